"""The oracle against values computed by hand, and the generator's promises."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nccl_ep import reference as ref
from nccl_ep.reference import DispatchResult, RankInput
from tests.support import cases
from tests.support.contents import as_bytes
from tests.support.coverage import Coverage

H = 8


def _world() -> list[RankInput]:
    """R = 2, E = 4, K = 2. Every element of a row names it: 10 and 11 of rank 0, 20 of rank 1."""
    return [
        RankInput(
            torch.tensor([[10.0], [11.0]]).expand(2, H).to(torch.bfloat16),
            torch.tensor([[0, 2], [1, 0]]),
            torch.tensor([[0.5, 0.25], [1.0, 2.0]]),
        ),
        RankInput(
            torch.full((1, H), 20.0, dtype=torch.bfloat16),
            torch.tensor([[0, 3]]),
            torch.tensor([[4.0, 8.0]]),
        ),
    ]


def _dispatch(layout: str, **options: Any) -> list[DispatchResult]:
    options.setdefault("zero_padding", True)
    return ref.dispatch(_world(), num_experts=4, max_tokens=2, layout=layout, **options)


def _names(x: Tensor) -> list[float]:
    """The first elements of all rows, having checked that the others equal them."""
    flat = x.reshape(-1, x.shape[-1]).to(torch.float32)
    assert torch.equal(flat.view(torch.int32), flat.view(torch.int32)[:, :1].expand_as(flat))
    return [float(value) for value in flat[:, 0]]


def _floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# --- dispatch


def test_expert_major_by_hand() -> None:
    left, right = _dispatch("expert_major")
    assert left.x.shape == (2, 4, H) and left.x.dtype == torch.bfloat16
    assert _names(left.x) == [10, 11, 20, 0, 11, 0, 0, 0]
    assert left.weights.tolist() == [[0.5, 2, 4, 0], [1, 0, 0, 0]]
    assert left.counts.tolist() == left.demand.tolist() == [3, 1] and left.counts.dtype == torch.int32
    assert left.valid.tolist() == [True, True, True, False, True, False, False, False]
    assert left.row_of.tolist() == [[[0, -1], [4, 1]], [[2, -1], [-1, -1]]]
    assert left.overflow.tolist() == [0] and left.overflow.dtype == torch.int32
    assert (left.topk_idx, left.scales, left.offsets, left.row_expert, left.total) == (None,) * 5
    assert _names(right.x) == [10, 0, 0, 0, 20, 0, 0, 0]
    assert right.weights.tolist() == [[0.25, 0, 0, 0], [8, 0, 0, 0]]
    assert right.row_of.tolist() == [[[-1, 0], [-1, -1]], [[-1, 4], [-1, -1]]]


def test_expert_major_drops_the_last_rows_of_an_expert() -> None:
    left, right = _dispatch("expert_major", capacity=2)
    assert _names(left.x) == [10, 11, 11, 0]
    assert left.counts.tolist() == [2, 1] and left.demand.tolist() == [3, 1]
    assert left.overflow.tolist() == [1] and right.overflow.tolist() == [0]
    assert left.row_of.tolist() == [[[0, -1], [2, 1]], [[-1, -1], [-1, -1]]]


def test_packed_begins_experts_at_multiples_of_the_alignment() -> None:
    left, right = _dispatch("packed", expert_alignment=4)
    # 2 ranks * 2 tokens * min(2, 2) + 2 * 3 = 14, rounded up to 16.
    assert left.x.shape == (16, H)
    assert left.offsets is not None and left.row_expert is not None
    assert left.offsets.tolist() == [0, 4, 8] and left.offsets.dtype == torch.int32
    assert left.row_expert.tolist() == [0, 0, 0, -1, 1] + [-1] * 11 and left.row_expert.dtype == torch.int32
    assert _names(left.x) == [10, 11, 20, 0, 11] + [0] * 11
    assert left.weights.tolist() == [0.5, 2, 4, 0, 1] + [0] * 11
    assert left.row_of.tolist() == [[[0, -1], [4, 1]], [[2, -1], [-1, -1]]]
    assert right.offsets is not None and right.offsets.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("capacity", "offsets", "counts", "dropped"),
    [(6, [0, 4, 6], [3, 1], 0), (4, [0, 4, 4], [3, 0], 1), (2, [0, 2, 2], [2, 0], 2)],
)
def test_packed_drops_the_last_rows(capacity: int, offsets: list[int], counts: list[int], dropped: int) -> None:
    left = _dispatch("packed", expert_alignment=4, capacity=capacity)[0]
    assert left.offsets is not None and left.offsets.tolist() == offsets
    assert left.counts.tolist() == counts and left.demand.tolist() == [3, 1]
    assert left.overflow.tolist() == [dropped]


def test_rank_major_by_hand() -> None:
    left, right = _dispatch("rank_major")
    assert left.x.shape == (2, 2, H) and _names(left.x) == [10, 11, 20, 0]
    assert left.topk_idx is not None and right.topk_idx is not None
    assert left.topk_idx.tolist() == [[[0, -1], [1, 0]], [[0, -1], [-1, -1]]]
    assert left.topk_idx.dtype == torch.int64
    assert left.weights.tolist() == [[[0.5, 0], [1, 2]], [[4, 0], [0, 0]]]
    assert left.counts.tolist() == [2, 1] and left.total is None
    # The one token of rank 0 that comes here is its first: rows are compact.
    assert _names(right.x) == [10, 0, 20, 0] and right.counts.tolist() == [1, 1]
    assert right.topk_idx.tolist() == [[[-1, 0], [-1, -1]], [[-1, 1], [-1, -1]]]
    assert left.row_of.tolist() == [[[0, -1], [1, 1]], [[2, -1], [-1, -1]]]


def test_flat_by_hand_and_what_it_drops() -> None:
    left, right = _dispatch("flat")
    assert left.x.shape == (4, H) and _names(left.x) == [10, 11, 20, 0]
    assert left.total is not None and left.total.tolist() == [3] and left.counts.tolist() == [2, 1]
    assert _names(right.x) == [10, 20, 0, 0]
    left = _dispatch("flat", capacity=1)[0]
    assert left.total is not None and left.total.tolist() == [1]
    assert left.counts.tolist() == [1, 0] and left.demand.tolist() == [2, 1] and left.overflow.tolist() == [2]
    assert left.topk_idx is not None and left.topk_idx.tolist() == [[0, -1]]
    assert left.row_of.tolist() == [[[0, -1], [-1, -1]], [[-1, -1], [-1, -1]]]


def test_duplicates_have_rows_of_their_own_and_invalid_ids_none() -> None:
    x = torch.arange(2.0).unsqueeze(1).expand(2, H)
    ids = torch.tensor([[1, 1, 2], [-5, 1, -1]], dtype=torch.int32)
    given = [RankInput(x, ids)]
    result = ref.dispatch(given, num_experts=2, max_tokens=3, layout="expert_major", zero_padding=True)[0]
    assert result.counts.tolist() == [0, 3]
    assert result.row_of.tolist() == [[[3, 4, -1], [-1, 5, -1], [-1, -1, -1]]]
    assert _names(result.x) == [0, 0, 0, 0, 0, 1] and result.weights[1].tolist() == [1, 1, 1]
    packed = ref.dispatch(given, num_experts=2, max_tokens=3, layout="packed", expert_alignment=4)[0]
    # 3 tokens * min(3, 2) + 2 * 3, rounded up.
    assert packed.x.shape == (12, H) and packed.row_of[0, 1].tolist() == [-1, 2, -1]
    flat = ref.dispatch(given, num_experts=2, max_tokens=3, layout="flat")[0]
    assert flat.topk_idx is not None and flat.topk_idx.dtype == torch.int32
    assert flat.topk_idx.tolist() == [[1, 1, -1], [-1, 1, -1], [-1, -1, -1]]
    assert ref.wire_rows(given, num_experts=2).tolist() == [[2]]


def test_wire_rows_count_a_row_for_each_rank_it_goes_to() -> None:
    assert ref.wire_rows(_world(), num_experts=4).tolist() == [[2, 1], [1, 1]]


def test_payload_and_scales_pass_bit_for_bit() -> None:
    words = torch.tensor([-1, -2, 0, 2**31 - 1], dtype=torch.int32)
    x = words.view(torch.float8_e4m3fn).unsqueeze(0)
    scales = torch.tensor([[1, 3], [2, 4]], dtype=torch.int32).t()[:1]
    assert scales.stride() != (2, 1)
    given = [RankInput(x, torch.tensor([[0]]), None, scales)]
    result = ref.dispatch(given, num_experts=1, max_tokens=2, layout="flat", zero_padding=True)[0]
    assert result.x.dtype == torch.float8_e4m3fn
    assert result.x[0].view(torch.int32).tolist() == words.tolist()
    assert result.scales is not None and result.scales.tolist() == [[1, 2], [0, 0]]


def test_no_tokens_anywhere_give_empty_results() -> None:
    given = [RankInput(torch.zeros(0, H), torch.zeros(0, 2, dtype=torch.int64)) for _ in range(2)]
    for layout in ref.LAYOUTS:
        results = ref.dispatch(given, num_experts=4, max_tokens=2, layout=layout)
        assert all(int(result.counts.sum()) == 0 and not result.valid.any() for result in results)
        rows = [result.x for result in results]
        assert ref.combine(rows, results, given, num_experts=4, layout=layout)[0].shape == (0, H)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "rows"},
        {"layout": "rank_major", "capacity": 3},
        {"layout": "flat", "expert_alignment": 2},
        {"layout": "flat", "max_tokens": 1},
        {"layout": "flat", "num_experts": 3},
        {"layout": "flat", "quant": "fp4"},
    ],
)
def test_dispatch_refuses_what_has_no_meaning(options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"num_experts": 4, "max_tokens": 2, **options}
    with pytest.raises(ValueError):
        ref.dispatch(_world(), **arguments)


# --- combine


def _lone(experts: list[int], num_ranks: int, weights: list[float] | None = None) -> list[RankInput]:
    """One token at rank 0, none elsewhere."""
    topk = len(experts)
    given = [RankInput(torch.zeros(0, H), torch.zeros(0, topk, dtype=torch.int64)) for _ in range(num_ranks)]
    factors = None if weights is None else torch.tensor([weights])
    given[0] = RankInput(torch.zeros(1, H), torch.tensor([experts]), factors)
    return given


def _combined(
    values: dict[int, float],
    experts: list[int],
    num_ranks: int = 1,
    *,
    num_experts: int = 4,
    dtype: torch.dtype = torch.float32,
    given_weights: list[float] | None = None,
    layout: str = "expert_major",
    **options: Any,
) -> float:
    """combine of a token for which expert e (in rank layouts: rank e) returns values[e]; all else is NaN."""
    given = _lone(experts, num_ranks, given_weights)
    results = ref.dispatch(given, num_experts=num_experts, max_tokens=1, layout=layout)
    rows = []
    for rank, result in enumerate(results):
        made = torch.full(result.x.shape, float("nan"))
        for source, value in values.items():
            if layout in ref.RANK_LAYOUTS:
                if source == rank:
                    made.view(-1, H)[0] = value
            elif source // (num_experts // num_ranks) == rank:
                made[source % (num_experts // num_ranks), 0] = value
        rows.append(made.to(dtype))
    out = ref.combine(rows, results, given, num_experts=num_experts, layout=layout, **options)
    assert [tensor.shape[0] for tensor in out] == [1] + [0] * (num_ranks - 1)
    return _names(out[0])[0]


def test_combine_by_hand_in_every_layout() -> None:
    given = _world()
    for layout in ref.EXPERT_LAYOUTS:
        results = _dispatch(layout, zero_padding=False)
        rows = [result.x for result in results]
        out = ref.combine(rows, results, given, num_experts=4, layout=layout)
        assert _names(out[0]) == [7.5, 33.0] and _names(out[1]) == [240.0]
        plain = ref.combine(rows, results, given, num_experts=4, layout=layout, weights=None)
        assert _names(plain[0]) == [20.0, 22.0] and _names(plain[1]) == [40.0]
        home = [torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, -1.0]])]
        out = ref.combine(rows, results, given, num_experts=4, layout=layout, weights=home)
        assert _names(out[0]) == [40.0, 11.0] and _names(out[1]) == [0.0]
    for layout in ref.RANK_LAYOUTS:
        results = _dispatch(layout, zero_padding=False)
        out = ref.combine([result.x for result in results], results, given, num_experts=4, layout=layout)
        assert _names(out[0]) == [20.0, 11.0] and _names(out[1]) == [40.0]


def test_choices_add_in_k_order() -> None:
    values = {0: 1e8, 1: 1.0, 2: -1e8}
    assert _combined(values, [0, 1, 2], weights=None) == 0.0
    assert _combined(values, [0, 2, 1], weights=None) == 1.0


def test_ranks_add_in_rank_order_whatever_k_says() -> None:
    values = {0: 1e8, 1: 1.0, 2: -1e8}
    for experts in ([0, 1, 2], [2, 0, 1]):
        assert _combined(values, experts, 3, num_experts=3, weights=None) == 0.0
    assert _combined({0: 1e8, 1: -1e8, 2: 1.0}, [2, 1, 0], 3, num_experts=3, weights=None) == 1.0


def test_sums_are_rounded_for_each_domain() -> None:
    values = {0: 1e8, 1: 1.0, 2: -1e8, 3: 1.0}
    for layout in ("expert_major", "flat"):
        combined = [_combined(values, [0, 1, 2, 3], 4, layout=layout, domain_size=d) for d in (None, 4, 2, 1)]
        assert combined == [1.0, 1.0, 0.0, 1.0]


def test_domain_rows_are_rounded_to_the_wire() -> None:
    values = {0: 1.0, 1: 2.0**-8, 2: 2.0**-8}
    options: dict[str, Any] = {"layout": "flat", "dtype": torch.bfloat16}
    # Alone, a domain's 1 + 2^-8 is a tie that goes to 1; over fp32 it is kept and completes to 1 + 2^-7.
    assert _combined(values, [0, 1, 2], 4, domain_size=2, **options) == 1.0
    wide = _combined(values, [0, 1, 2], 4, domain_size=2, wire_dtype=torch.float32, **options)
    assert wide == 1.0 + 2.0**-7


def test_partials_are_rounded_to_the_wire_the_home_rank_too() -> None:
    values = {0: 1.0, 1: 2.0**-8, 2: 2.0**-8}
    options: dict[str, Any] = {"num_experts": 4, "weights": None, "dtype": torch.bfloat16}
    assert _combined(values, [0, 1, 2], 2, **options) == 1.0
    assert _combined(values, [0, 1, 2], 2, wire_dtype=torch.float32, **options) == 1.0 + 2.0**-7


def test_products_are_rounded_before_they_are_added() -> None:
    values = {0: -(1 + 2.0**-11), 1: 1 + 2.0**-12}
    assert _combined(values, [0, 1], given_weights=[1.0, 1 + 2.0**-12]) == 0.0


def test_a_sum_of_negative_zeros_is_one() -> None:
    assert np.signbit(_combined({0: -0.0, 1: -0.0}, [0, 1], weights=None))
    assert np.signbit(_combined({0: -0.0}, [0], 2))
    assert not np.signbit(_combined({}, [-1, 7]))
    # Rank 0 sends the +0 of a row that is masked, and +0 + -0 is +0.
    home = [torch.ones(1, 2), torch.ones(0, 2)]
    masks = [torch.tensor([[-1, 2]]), torch.zeros(0, 2, dtype=torch.int64)]
    assert not np.signbit(_combined({2: -0.0}, [0, 2], 2, weights=home, topk_idx=masks))


def test_nan_of_a_masked_row_counts_for_nothing() -> None:
    home = [torch.tensor([[0.0, 2.0]])]
    assert np.isnan(_combined({1: 3.0}, [0, 1], weights=home))
    assert _combined({1: 3.0}, [0, 1], weights=home, topk_idx=[torch.tensor([[-1, 1]])]) == 6.0
    assert _combined({}, [0, 1], weights=home, topk_idx=[torch.tensor([[-1, -1]])]) == 0.0


def test_dropped_rows_are_absent_from_sums() -> None:
    given = _world()
    results = _dispatch("expert_major", capacity=1)
    out = ref.combine([result.x for result in results], results, given, num_experts=4, layout="expert_major")
    assert _names(out[0]) == [7.5, 11.0] and _names(out[1]) == [160.0]


def test_biases_are_added_first() -> None:
    big, small = torch.full((1, H), 1e8), torch.ones(1, H)
    values = {0: 1.0, 1: -1e8}
    empty = torch.zeros(0, H)
    combined = [
        _combined(values, [0, 2], 2, layout="flat", bias=[first, empty])
        for first in (None, small, (small, small), (big, small), (small, -big))
    ]
    # 1e8 swallows what comes one by one: fp32 has steps of 8 there.
    assert combined == [-1e8, -1e8, -1e8, 0.0, -2e8]
    alone = _combined({}, [-1], layout="flat", bias=[(big, small)])
    assert alone == 1e8


def test_an_fp16_sum_overflows_to_infinity() -> None:
    values = {0: 60000.0, 1: 60000.0, 2: -60000.0}
    assert _combined(values, [0, 1, 2], dtype=torch.float16, weights=None) == 60000.0
    options: dict[str, Any] = {"num_experts": 4, "weights": None, "dtype": torch.float16}
    assert _combined(values, [0, 1, 2], 2, **options) == float("inf")
    assert _combined(values, [0, 1, 2], 2, wire_dtype=torch.float32, **options) == 60000.0


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("flat", {"weights": [torch.ones(2, 2), torch.ones(1, 2)]}),
        ("packed", {"bias": [None, None]}),
        ("packed", {"topk_idx": [torch.zeros(2, 2), torch.zeros(1, 2)]}),
        ("packed", {"weights": "home"}),
        ("packed", {"domain_size": 3}),
        ("packed", {"wire_dtype": torch.float16}),
    ],
)
def test_combine_refuses_what_has_no_meaning(layout: str, options: dict[str, Any]) -> None:
    results = _dispatch(layout)
    rows = [result.x for result in results]
    with pytest.raises(ValueError):
        ref.combine(rows, results, _world(), num_experts=4, layout=layout, **options)


def test_combine_weights_brings_each_weight_home() -> None:
    for layout in ref.LAYOUTS:
        results = _dispatch(layout)
        home = ref.combine_weights(
            [result.weights for result in results], results, _world(), num_experts=4, layout=layout
        )
        for got, given in zip(home, _world(), strict=True):
            assert given.topk_weights is not None and torch.equal(got, given.topk_weights)
    results = _dispatch("flat", capacity=1)
    values = [torch.tensor([[5.0, 6.0]]), torch.tensor([[7.0, 8.0]])]
    home = ref.combine_weights(values, results, _world(), num_experts=4, layout="flat")
    assert home[0].tolist() == [[5.0, 8.0], [0.0, 0.0]] and home[1].tolist() == [[0.0, 0.0]]


# --- FP8

_E4M3 = [mantissa * 2.0**-9 for mantissa in range(8)] + [
    (1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)
][:-1]


def _quantized(values: list[float], mode: str = "fp8", amax: float = 448.0) -> list[int]:
    """Bytes of values (at most 127) that share a group with its largest, amax."""
    row = torch.zeros(1, 128)
    row[0, : len(values)] = torch.tensor(values)
    row[0, 127] = amax
    return ref.quantize_fp8(row, mode)[0].view(torch.uint8)[0, : len(values)].tolist()


def test_fp8_rounds_to_nearest_even() -> None:
    assert len(_E4M3) == 127 and _E4M3[-1] == 448.0
    assert _quantized(_E4M3) == list(range(127))
    assert _quantized([-value for value in _E4M3]) == [128 + code for code in range(127)]
    middle = [(low + high) / 2 for low, high in itertools.pairwise(_E4M3)]
    assert _quantized(middle) == [code + code % 2 for code in range(126)]
    above = [float(np.nextafter(np.float32(value), np.float32(1e9))) for value in middle]
    assert _quantized(above) == list(range(1, 127))


def test_fp8_scales_of_known_groups_are_those_by_hand() -> None:
    inverse = np.float32(1) / np.float32(448)
    row = torch.zeros(1, 144)
    row[0, 0], row[0, 5], row[0, 128], row[0, 130] = -3.0, 1.5, 0.25, float("nan")
    codes, scales = ref.quantize_fp8(row, "fp8")
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (1, 144)
    assert scales.tolist() == [[float(np.float32(3) * inverse), float(np.float32(0.25) * inverse)]]
    assert [int(codes.view(torch.uint8)[0, i]) for i in (0, 5, 128)] == [0xFE, 0x76, 0x7E]
    assert int(codes.view(torch.uint8)[0, 130]) & 0x7F == 0x7F
    # 3 / 448 lies in (2^-8, 2^-7], 0.25 / 448 in (2^-11, 2^-10]: -384, 192 and 256 are stored.
    codes, scales = ref.quantize_fp8(row, "fp8_rounded")
    assert scales.tolist() == [[2.0**-7, 2.0**-10]]
    assert codes.to(torch.float32)[0, [0, 5, 128]].tolist() == [-384.0, 192.0, 256.0]
    codes_packed, packed = ref.quantize_fp8(row, "fp8_ue8m0")
    assert packed.dtype == torch.int32 and packed.tolist() == [[120 | 117 << 8]]
    assert ref.bits_equal(codes, codes_packed)


def test_fp8_powers_are_exact_at_their_edge() -> None:
    row = torch.zeros(4, 16)
    row[0, 0], row[1, 0], row[2, 0] = 448.0, 449.0, 896.0
    _, scales = ref.quantize_fp8(row, "fp8_rounded")
    assert scales[:, 0].tolist() == [1.0, 2.0, 2.0, 2.0**-22]
    codes, scales = ref.quantize_fp8(row[3:], "fp8")
    assert scales.item() == float(np.float32(1e-4) * (np.float32(1) / np.float32(448)))
    assert codes.view(torch.uint8).sum() == 0


def test_fp8_packs_four_groups_a_word() -> None:
    row = torch.zeros(1, 528)
    row[0, [0, 128, 256, 384, 512]] = 448 * 2.0 ** torch.arange(5)
    codes, scales = ref.quantize_fp8(row, "fp8_ue8m0")
    assert scales.view(torch.uint8).tolist() == [[127, 128, 129, 130, 131, 0, 0, 0]]
    assert codes.to(torch.float32)[0, [0, 128, 256, 384, 512]].tolist() == [448.0] * 5


def test_fp8_of_infinity_is_nan_or_the_largest() -> None:
    inf = float("inf")
    row = torch.zeros(1, 16)
    row[0, :3] = torch.tensor([inf, -inf, 1.0])
    codes, scales = ref.quantize_fp8(row, "fp8")
    assert scales.item() == inf and codes.to(torch.float32)[0, :3].isnan().tolist() == [True, True, False]
    assert float(codes[0, 2]) == 0.0
    codes, scales = ref.quantize_fp8(row, "fp8_ue8m0")
    assert scales.item() == 254 and codes.to(torch.float32)[0, :3].tolist() == [448.0, -448.0, 0.0]


def test_dispatch_quantizes_with_a_rounded_factor() -> None:
    given = [RankInput(torch.full((1, 16), 3.0, dtype=torch.bfloat16), torch.tensor([[0]]))]
    result = ref.dispatch(
        given,
        num_experts=1,
        max_tokens=1,
        layout="expert_major",
        quant="fp8_rounded",
        capacity=2,
        zero_padding=True,
    )[0]
    assert result.scales is not None and result.scales.tolist() == [[[2.0**-7], [0.0]]]
    assert result.x.dtype == torch.float8_e4m3fn and _names(result.x) == [384.0, 0.0]


# --- comparison


def test_bits_are_compared_and_nan_equals_nan() -> None:
    nan_a = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    nan_b = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert ref.bits_equal(nan_a, nan_b)
    assert not ref.bits_equal(nan_a.view(torch.int32), nan_b.view(torch.int32))
    codes = torch.tensor([0x7F, 0xFF, 1], dtype=torch.uint8)
    assert ref.bits_equal(codes[:1].view(torch.float8_e4m3fn), codes[1:2].view(torch.float8_e4m3fn))
    assert not ref.bits_equal(codes[:1].view(torch.float8_e4m3fn), codes[2:].view(torch.float8_e4m3fn))
    assert not ref.bits_equal(_floats(0.0), _floats(-0.0))
    assert "dtype" in ref.first_difference(_floats(0.0), _floats(0.0).to(torch.bfloat16))
    assert "shape" in ref.first_difference(_floats(0.0), _floats(0.0, 1.0))
    text = ref.first_difference(_floats(1, 2, 3).view(1, 3), _floats(1, 2, -3).view(1, 3))
    assert "1 of 3" in text and "[0, 2]" in text and "0x40400000" in text and "-3.0" in text
    column = torch.arange(6.0).view(2, 3).t()
    assert ref.first_difference(column, column.contiguous()) == ""


def test_all_bytes_of_packed_fp4_are_numbers() -> None:
    """All 256 bytes are numbers, also those that would be NaN in E4M3; strides do not matter."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    packed, other = codes.view(torch.float4_e2m1fn_x2), codes.clone()
    assert ref.bits_equal(packed, packed.clone()) and ref.bits_equal(packed.t(), packed.t().contiguous())
    other[7, 15] = 0xFF
    text = ref.first_difference(packed, other.view(torch.float4_e2m1fn_x2))
    assert text == "1 of 256 elements differ, first at [7, 15]: 127 (0x7F) against 255 (0xFF)"
    assert "dtype" in ref.first_difference(packed, codes) and "shape" in ref.first_difference(packed, packed[:1])


# --- the generator


def test_cases_are_functions_of_their_seed() -> None:
    for seed in range(40):
        case, again = cases.generate(seed), cases.generate(seed)
        assert case == again and case.describe() == again.describe()
        for first, second in zip(case.inputs(), again.inputs(), strict=True):
            assert ref.bits_equal(as_bytes(first.x), as_bytes(second.x)) and torch.equal(
                first.topk_idx, second.topk_idx
            )
            assert first.x.numel() * first.x.element_size() % 16 == 0 and first.x.is_contiguous()
        results = ref.dispatch(case.inputs(), **case.dispatch_kwargs())
        for rank, result in enumerate(results):
            rows = case.expert(result.x, result, rank)
            assert ref.bits_equal(rows, again.expert(result.x, result, rank))
            assert rows.shape == result.x.shape and rows.dtype == case.rows_dtype
            assert rows.view(-1, case.hidden)[~result.valid].isnan().all()


def test_cases_cover_every_bucket() -> None:
    coverage = Coverage()
    for seed in cases.seeds(cases.ENOUGH):
        case = cases.generate(seed)
        coverage.add(case, ref.dispatch(case.inputs(), **case.dispatch_kwargs()))
    assert not coverage.missing(), coverage.report()
    assert "empty buckets: none" in coverage.report()
