"""The oracle: what dispatch and combine must return, bit for bit, computed in one process on the CPU.

Every function takes the tensors of all ranks and returns those of all ranks, so that nothing here depends on
a transport. Low latency and high throughput must both give these bits. It is written from the semantics alone
and shares no code with the library it judges.

Its bits are its own: it adds one row after the other, element by element, and asks torch for no sum, whose order
depends on the sizes. It names every dtype. A compiler may leave out a rounding or fuse a product, so the oracle is
never compiled: torch.compile runs it as it is, and refuses it with fullgraph=True.

Notation: R ranks, E experts, L = E / R experts a rank, T tokens of a rank, M = max_tokens, K choices a token,
H elements a row, S scales a row.
"""

from .formats import (
    BLOCK_MODES,
    FP8_GROUP,
    QUANT_MODES,
    WIRE_FORMATS,
    bits_equal,
    first_difference,
    quantize,
    quantize_fp8,
    quantize_mxfp8,
    quantize_nvfp4,
    rounded_to_wire,
    swizzled,
)
from .operations import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    RANK_LAYOUTS,
    DispatchResult,
    RankInput,
    combine,
    combine_weights,
    dispatch,
    wire_rows,
)

__all__ = [
    "BLOCK_MODES",
    "EXPERT_LAYOUTS",
    "FP8_GROUP",
    "LAYOUTS",
    "QUANT_MODES",
    "RANK_LAYOUTS",
    "WIRE_FORMATS",
    "DispatchResult",
    "RankInput",
    "bits_equal",
    "combine",
    "combine_weights",
    "dispatch",
    "first_difference",
    "quantize",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "rounded_to_wire",
    "swizzled",
    "wire_rows",
]
