"""A rank's use of the C library: tensors of torch as descriptors, groups over threads, generated cases."""

from __future__ import annotations

import contextlib
import ctypes as c
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.c import c_api
from tests.c.c_api import Library, Refused
from tests.support.cases import Case
from tests.support.contents import EXPONENTS, FP4, as_bytes
from tests.support.expected import Expected
from tests.support.harness import check_padding, copy_to

TOOLS = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # cmake of the environment
SECOND = 10**9
QUANTS = {None: 0, "fp8": 1, "fp8_rounded": 2, "fp8_ue8m0": 3}
DTYPES = {torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
          torch.bfloat16: 9, torch.float8_e4m3fn: 10}  # fmt: skip
WIRES = {None: 0, torch.float32: 1, "fp8": 2, "logfmt": 3}  # a 16-bit type is that of the output
BYTES = FP4 + EXPONENTS  # what the library has no name for: bytes of it
OUTPUTS = ("tokens", "scales", "topk_weights", "topk_idx", "row_expert", "info")
EXTRA = tuple(f"extra[{i}]" for i in range(3))
TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}


def run(*arguments: str | Path, **options: Any) -> str:
    done = subprocess.run(
        [str(a) for a in arguments], timeout=1200, capture_output=True, text=True, **{"env": TOOLS, **options}
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def refused(result: int, pattern: str, call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(Refused, match=pattern) as caught:
        call(*arguments)
    assert caught.value.result == result, caught.value


def tensor(given: torch.Tensor | None) -> Any:
    """A descriptor of it. The tensor must outlive the call."""
    if given is None:
        return None
    dtype = DTYPES[torch.uint8 if given.dtype in BYTES else given.dtype]
    described = c_api.Tensor(given.dim(), dtype, given.data_ptr() or None, given.shape)
    if given.dim() == 2 and not given.is_contiguous():
        described.strides = given.stride()
    return described


def as_given(made: dict[str, Any], **given: torch.Tensor | None) -> dict[str, Any]:
    """Outputs of a dispatch; those of BYTES in the types of what was given by their names."""
    seen = dict(made)
    for name, each in given.items():
        if each is not None and each.dtype in BYTES:
            seen[name] = made[name].view(each.dtype)
    return seen


def allgather_of(group: ThreadGroup) -> Any:
    def gather(_: Any, mine: int, everything: int, size: int, timeout_ns: int) -> int:
        try:
            texts = b"".join(group.allgather(c.string_at(mine, size), timeout_ns / SECOND))
        except nccl_ep.TimeoutError:
            return c_api.TIMEOUT
        c.memmove(everything, texts, len(texts))
        return c_api.NO_ERROR

    return c_api.Allgather(gather)


def make_group(library: Library, group: ThreadGroup, **config: Any) -> c.c_void_p:
    made, gather = c.c_void_p(), allgather_of(group)
    fields = {"num_experts": 2 * group.size(), "max_tokens": 8, "topk": 2, "max_token_bytes": 128, **config}
    fields.setdefault("timeout_ns", 60 * SECOND)
    library.CreateGroupFromCallback(made, group.rank(), group.size(), gather, None, c_api.GroupConfig(**fields))
    made.gather = gather  # type: ignore[attr-defined]  # ncclEpMaskClean calls it
    return made


class CaseRun:
    """One rank's part of a generated case, through the C library."""

    num_sms = 0  # of every dispatch and combine

    def __init__(
        self,
        library: Library,
        expected: Expected,
        group: Any,
        staged: bool,
        device: str,
        make: Any = make_group,
        **config: Any,
    ) -> None:
        self.library, self.expected, self.case, self.staged = library, expected, expected.case, staged
        self.rank, self.device = group.rank(), torch.device(device)
        case = self.case
        sizes = {
            "num_experts": case.num_experts, "max_tokens": case.max_tokens, "topk": case.topk,
            "device": -1 if device == "cpu" else torch.cuda.current_device(), "domain_size": case.domain_size or 0,
            "max_token_bytes": case.hidden * case.dtype.itemsize + -(-case.scales_width * 8 // 16) * 16,
            "max_combine_row_bytes": case.hidden * 4,
        }  # fmt: skip
        self.group = make(library, group, **{**sizes, **config})

    def move(self, given: torch.Tensor | None) -> torch.Tensor | None:
        return None if given is None else copy_to(given, self.device)

    def finish(self, handle: c.c_void_p, inputs: list[torch.Tensor | None]) -> None:
        """Inputs are the caller's again once the send is done."""
        if self.staged:
            for given in inputs:
                if given is not None:
                    as_bytes(given).zero_()
            self.library.Complete(handle, None, self.stream())

    def stream(self) -> int | None:
        """torch's current one, as C takes it."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None

    def new(self, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)

    def run_dispatch(self, handle: c.c_void_p, inputs: Any, config: Any) -> dict[str, Any]:
        """Into outputs of the shapes that the library says, by name; None for those that there are not."""
        described = {name: c_api.Tensor() for name in OUTPUTS}
        more = [c_api.Tensor() for _ in EXTRA]
        outputs = c_api.DispatchOutputs(**{name: described[name] for name in OUTPUTS}, extra=more)
        described |= dict(zip(EXTRA, more, strict=True))
        self.library.DispatchShapes(handle, inputs, config, outputs)
        made: dict[str, Any] = dict.fromkeys(described)
        for name, shape in described.items():
            if shape.ndim > 0:
                sizes, dtype = shape.shape(), TORCH_DTYPES[shape.dtype]
                size = c.c_size_t()
                self.library.TensorBytes(shape, size)
                made[name] = self.new(sizes, dtype)
                assert size.value == made[name].nbytes
                made[name].view(torch.uint8).fill_(0xA5)
                shape.data = made[name].data_ptr() or None
        self.library.Dispatch(handle, inputs, outputs, config, self.stream())
        return made

    def dispatch(self, handle: c.c_void_p) -> nccl_ep.DispatchOutput:
        case, given = self.case, self.expected.inputs[self.rank]
        x, ids, weights, scales = map(self.move, (given.x, given.topk_idx, given.topk_weights, given.scales))
        self.library.UpdateHandle(handle, tensor(ids))
        inputs = c_api.DispatchInputs(tokens=tensor(x), topk_weights=tensor(weights), scales=tensor(scales))
        config = c_api.DispatchConfig(
            send_only=self.staged, quant=QUANTS[case.quant], zero_padding=case.zero_padding, num_sms=self.num_sms
        )
        made = self.run_dispatch(handle, inputs, config)
        self.finish(handle, [x, ids, weights, scales])
        return self.output(as_given(made, tokens=x, scales=scales))

    def output(self, made: dict[str, Any]) -> nccl_ep.DispatchOutput:
        case = self.case
        bins = case.num_experts // case.num_ranks if case.layout in ("expert_major", "packed") else case.num_ranks
        info = made["info"]
        return nccl_ep.DispatchOutput(
            x=made["tokens"], scales=made["scales"], topk_idx=made["topk_idx"], weights=made["topk_weights"],
            counts=info[:bins], demand=info[bins : 2 * bins], overflow=info[2 * bins : 2 * bins + 1],
            offsets=info[2 * bins + 2 :] if case.layout == "packed" else None, row_expert=made["row_expert"],
            total=info[2 * bins + 1 : 2 * bins + 2] if case.layout == "flat" else None, handle=None,
        )  # type: ignore[arg-type]  # fmt: skip

    def combine(self, handle: c.c_void_p) -> torch.Tensor:
        rows = self.move(self.expected.rows[self.rank])
        assert rows is not None
        return self.combine_rows(handle, rows)

    def combine_rows(
        self, handle: c.c_void_p, rows: torch.Tensor, values: torch.Tensor | None = None,
        home_values: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.bring_home(handle, rows, values, home_values).cpu()

    def bring_home(
        self, handle: c.c_void_p, rows: torch.Tensor, values: torch.Tensor | None = None,
        home_values: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """A combine whose result stays where it is. Staged: overwrites the rows."""
        case, kwargs = self.case, self.case.rank_combine_kwargs(self.rank)
        weights, ids = (
            self.move(kwargs[name]) if isinstance(kwargs[name], torch.Tensor) else None
            for name in ("weights", "topk_idx")
        )
        biases = [self.move(each) for each in kwargs["bias"] or ()]
        result = torch.empty_like(self.expected.combined[self.rank], device=self.device)
        inputs = c_api.CombineInputs(
            tokens=tensor(rows), topk_weights=tensor(weights), topk_idx=tensor(ids),
            bias0=tensor(biases[0] if biases else None), bias1=tensor(biases[1] if len(biases) > 1 else None),
            values=tensor(values),
        )  # fmt: skip
        named = {"dispatch": c_api.WEIGHTS_DISPATCH, "none": c_api.WEIGHTS_NONE}
        config = c_api.CombineConfig(
            send_only=self.staged, weights=named.get(case.combine_weights, c_api.WEIGHTS_HOME),
            wire_dtype=WIRES.get(case.wire_dtype, 0), num_sms=self.num_sms, scale=case.scale,
        )  # fmt: skip
        outputs = c_api.CombineOutputs(tokens=tensor(result), values=tensor(home_values))
        self.library.Combine(handle, inputs, outputs, config, self.stream())
        self.finish(handle, [rows, weights, ids])
        return result

    def scalars(self, handle: c.c_void_p) -> torch.Tensor:
        values = self.move(self.expected.values[self.rank])
        result = torch.empty_like(self.expected.scalars[self.rank], device=self.device)
        self.library.CombineWeights(handle, tensor(values), tensor(result), self.stream())
        return result.cpu()

    def require_usable(self) -> None:
        """Raises what keeps the group from being used. Of the case's own ids out of range and dropped rows Check tells
        once each."""
        for _ in range(2):
            with contextlib.suppress(c_api.Refused):
                self.library.Check(self.group)
        self.library.Check(self.group)

    def run(self) -> None:
        case, library = self.case, self.library
        config = c_api.HandleConfig(
            layout=c_api.LAYOUTS[case.layout], capacity=case.capacity or 0, expert_alignment=case.expert_alignment
        )
        size = c.c_size_t()
        library.HandleMemSize(self.group, config, size)
        memory = torch.full((size.value + 64,), 0x77, dtype=torch.uint8, device=self.device)
        handle = c.c_void_p()
        library.InitHandle(handle, self.group, config, memory.data_ptr() if case.seed % 2 else None)
        for _ in range(2):  # a handle serves again
            out = self.dispatch(handle)
            sums = [self.combine(handle) for _ in range(2)]
            scalars = self.scalars(handle)
            self.require_usable()  # its error says more than a difference does
            self.expected.check_dispatch(out, self.rank)
            if case.zero_padding:
                check_padding(out, self.expected.results[self.rank], self.expected.where(self.rank))
            for each in sums:
                self.expected.check_combine(each, self.rank)
            self.expected.check_scalars(scalars, self.rank)
        assert (memory[size.value :] == 0x77).all(), "the library wrote past the handle's memory"
        info = c_api.GroupInfo()
        library.GroupGetInfo(self.group, info)
        assert (info.num_dispatches, info.num_combines, info.num_ranks) == (2, 6, case.num_ranks)
        library.HandleDestroy(handle)
        library.GroupDestroy(self.group)


def has_c_form(case: Case) -> bool:
    """In C a capacity of 0 is the default."""
    return case.capacity != 0


def run_case(library: Library, expected: Expected, *, staged: bool, device: str = "cpu", num_sms: int = 0) -> None:
    def body(group: ThreadGroup) -> None:
        run = CaseRun(library, expected, group, staged, device)
        run.num_sms = num_sms
        run.run()

    run_ranks(expected.case.num_ranks, body)
