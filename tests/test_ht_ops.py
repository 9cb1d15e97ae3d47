"""The ops of high throughput as a compiler sees them: opcheck, fakes, exact sizes as symbols, a compiled layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expected import Expected, plain_case
from op_checks import HT_OPS as OPS
from op_checks import UTILS, as_fake, described
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import nccl_ep
from nccl_ep import reference
from nccl_ep.handle import LAYOUTS, QUANTS
from nccl_ep.testing import run_ranks

ops = torch.ops.nccl_ep


def _case(num_ranks: int, layout: str, quant: str | None = None, **changes: Any) -> Expected:
    capacity = 8 * num_ranks if layout == "expert_major" else None
    alignment = 4 if layout == "packed" else 1
    changes = {"hidden": 640, **changes}
    return Expected(
        plain_case(
            num_ranks, layout=layout, quant=quant, expert_alignment=alignment, capacity=capacity, zero_padding=True,
            **changes,
        )
    )  # fmt: skip


def _buffer(case: Expected, group: Any) -> nccl_ep.Buffer:
    shape = case.case
    return nccl_ep.Buffer.for_shapes(
        group, max_tokens=shape.max_tokens, hidden=shape.hidden, topk=shape.topk, num_experts=shape.num_experts,
        mode="ht", scale_bytes=2000, wire_dtype=torch.float32, device="cpu", timeout=60.0,
        domain_size=shape.domain_size,
    )  # fmt: skip


class Calls:
    """Arguments of every op for one case on one buffer, after a dispatch whose handle the combines use."""

    def __init__(self, case: Expected, buffer: nccl_ep.Buffer) -> None:
        shape, given, rank = case.case, case.inputs[buffer.rank], buffer.rank
        extra = torch.arange(8.0 * len(given.x)).view(-1, 8)
        out = nccl_ep.dispatch(
            given.x, given.topk_idx, given.topk_weights, buffer=buffer, mode="ht", scales=given.scales, extra=[extra],
            **shape.dispatch_kwargs(),
        )  # fmt: skip
        handle, layout = out.handle, LAYOUTS[shape.layout]
        head, quant = (buffer.name, buffer._seq), int(QUANTS[shape.quant])
        config = (
            shape.num_experts, shape.max_tokens, int(layout), handle.capacity, shape.expert_alignment, quant, True, 0,
        )  # fmt: skip
        dispatch = (*head, [given.x, extra], given.scales, given.topk_idx, given.topk_weights, *config)
        how = (int(layout.has_expert_rows), torch.float32, torch.float32, 0)
        biases = [given.x.float()] if shape.layout == "flat" else []
        routes = (handle.tensor, handle.slots)
        combine = (*head, case.rows[rank], case.values[rank], *routes, None, None, biases, *handle.args(), *how)
        made = ops.ht_dispatch.default(*dispatch)
        outs = [[torch.zeros_like(made[0]), torch.zeros_like(made[8])], *(torch.zeros_like(each) for each in made[1:8])]
        deepep = (
            *head, given.x, given.scales, given.topk_idx, given.topk_weights, shape.num_experts, shape.max_tokens,
            len(given.x) * buffer.num_ranks, 0,
        )  # fmt: skip
        self.out = out
        self.args: dict[str, tuple[Any, ...]] = {
            "ht_dispatch": dispatch,
            "ht_dispatch_out": (*dispatch, *outs),
            "ht_dispatch_cached": (*head, [given.x, extra], None, *routes, *handle.args(), quant, True, 0),
            "ht_dispatch_deepep": deepep,
            "ht_combine": combine,
            "ht_combine_out": (*combine, torch.zeros(len(given.x), shape.hidden)),
            "arena_empty": (*head, [3, 5], torch.float16),
        }

    def run(self, name: str) -> Any:
        return getattr(ops, name).default(*self.args[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_opcheck_alone(name: str, layout: str) -> None:
    case = _case(1, layout)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        # Contents of an uninitialised tensor are nobody's.
        utils = UTILS[:3] if name == "arena_empty" else UTILS
        for util in utils:
            torch.library.opcheck(getattr(ops, name).default, calls.args[name], test_utils=util)
        case.check_combine(nccl_ep.combine(case.rows[0], calls.out.handle), 0)


@pytest.mark.parametrize("name", OPS)
def test_opcheck_of_ranks_in_lockstep(name: str) -> None:
    case = _case(4, "packed", domain_size=2)

    def body(group: Any) -> None:
        with _buffer(case, group) as buffer:
            calls = Calls(case, buffer)
            for util in ("test_schema", "test_faketensor"):
                torch.library.opcheck(getattr(ops, name).default, calls.args[name], test_utils=util)
            case.combine(buffer, calls.out.handle)

    run_ranks(4, body)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_are_what_the_ops_return(layout: str, quant: str | None) -> None:
    scales = {"scales_dtype": torch.int32, "scales_width": 3} if quant is None else {}
    case = _case(2, layout, quant, tokens=(3, 0), idx_dtype=torch.int32, **scales)

    def body(group: Any) -> None:
        with _buffer(case, group) as buffer:
            calls = Calls(case, buffer)
            for name in OPS:
                with FakeTensorMode() as mode:
                    faked = described(getattr(ops, name).default(*(as_fake(mode, each) for each in calls.args[name])))
                assert faked == described(calls.run(name)), name

    run_ranks(2, body)


@pytest.mark.parametrize("num_experts", [3, 4, 5])
def test_fakes_know_the_size_of_a_route(num_experts: int) -> None:
    """Its parts are aligned, and one of them has a word more than experts."""
    case = _case(1, "flat", num_experts=num_experts)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        for name in ("ht_dispatch", "ht_dispatch_deepep"):
            with FakeTensorMode() as mode:
                faked = described(getattr(ops, name).default(*(as_fake(mode, each) for each in calls.args[name])))
            assert faked == described(calls.run(name)), name


@pytest.mark.parametrize("layout", ["flat", "packed", "rank_major"])
def test_exact_sizes_are_symbols(layout: str) -> None:
    """What is only known when the op runs must not be a number in a trace."""
    case = _case(1, layout)
    with _buffer(case, None) as buffer:
        calls = Calls(case, buffer)
        args = list(calls.args["ht_dispatch"])
        args[9] = -1  # capacity
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            faked = ops.ht_dispatch.default(
                *[
                    [mode.from_tensor(t, static_shapes=True) for t in each] if isinstance(each, list)
                    else mode.from_tensor(each, static_shapes=True) if isinstance(each, torch.Tensor) else each
                    for each in args
                ]
            )  # fmt: skip
        real = ops.ht_dispatch.default(*args)
        assert isinstance(faked[7].shape[0], torch.SymInt)
        assert isinstance(faked[0].shape[0], torch.SymInt) == (layout != "rank_major")
        for tensor, symbolic in zip(real, faked, strict=True):
            assert tensor.dtype == symbolic.dtype and tensor.dim() == symbolic.dim()
            for size, symbol in zip(tensor.shape, symbolic.shape, strict=True):
                assert isinstance(symbol, torch.SymInt) or size == symbol


def test_exact_sizes_in_deepeps_convention() -> None:
    """The rows are a symbol; the counts are not, and lie where the host can read them."""
    case = _case(1, "flat")
    with _buffer(case, None) as buffer:
        args = list(Calls(case, buffer).args["ht_dispatch_deepep"])
        args[8] = -1  # capacity
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            faked = ops.ht_dispatch_deepep.default(
                *[mode.from_tensor(t, static_shapes=True) if isinstance(t, torch.Tensor) else t for t in args]
            )
        real = ops.ht_dispatch_deepep.default(*args)
        assert isinstance(faked[0].shape[0], torch.SymInt) and isinstance(faked[6].shape[0], torch.SymInt)
        for tensor, symbolic in zip(real, faked, strict=True):
            assert tensor.dtype == symbolic.dtype and tensor.dim() == symbolic.dim()
            for size, symbol in zip(tensor.shape, symbolic.shape, strict=True):
                assert isinstance(symbol, torch.SymInt) or size == symbol
        ids = case.inputs[0].topk_idx
        assert real[8].device.type == faked[8].device.type == "cpu"
        assert real[8].tolist() == [len(ids), *(int((ids == expert).sum()) for expert in range(2))]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_layer(layout: str, backend: str) -> None:
    case = _case(1, layout)
    given = case.inputs[0]
    with _buffer(case, None) as buffer:

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, mode="ht", **case.case.dispatch_kwargs())
            return nccl_ep.combine(out.x * 2, out.handle)

        args = (given.x, given.topk_idx, given.topk_weights)
        want = layer(*args)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for _ in range(3):
            assert not reference.first_difference(compiled(*args), want)
