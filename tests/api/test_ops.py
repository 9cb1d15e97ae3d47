"""The ops under torch.ops.nccl_ep as a compiler sees them: schemas, fakes, opcheck, modes, and a compiled layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests import aot_autograd_check
from torch.utils import _pytree as pytree

import nccl_ep
from nccl_ep import reference
from nccl_ep.config import combine_args, pack_dispatch
from nccl_ep.handle import LAYOUTS, QUANTS
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.expected import Expected, plain_case
from tests.support.harness import make_buffer
from tests.support.op_checks import (
    ARRIVAL_OPS,
    BESIDE_OPS,
    EXACT_OPS,
    HT_OPS,
    LOCAL_OPS,
    SIGNALLED_OPS,
    UTILS,
    apart_from_numbers,
    as_fake,
    check_apart,
    check_compiled,
    described,
    faked,
)

OPS = [
    "ll_dispatch", "ll_dispatch_out", "ll_dispatch_send", "ll_dispatch_recv", "ll_dispatch_recv_out", "ll_combine",
    "ll_combine_out", "ll_combine_send", "ll_combine_recv", "ll_combine_recv_out", "ll_combine_weights",
    "require_no_overflow", "row_carrier",
]  # fmt: skip
DEEPEP_OPS = [
    "ll_dispatch_deepep", "ll_dispatch_deepep_send", "ll_dispatch_deepep_recv", "ll_combine_deepep",
    "ll_combine_deepep_send", "ll_combine_deepep_recv",
]  # fmt: skip
DEEPEP_QUANTS = [None, "fp8", "fp8_rounded", "fp8_ue8m0"]
SPLIT = [name for name in OPS if "_send" in name or "_recv" in name]
WRITE = {
    "ll_dispatch_out": {"handle"}, "ll_dispatch_recv": {"handle"}, "ll_dispatch_recv_out": {"handle"},
    "ht_dispatch_routed": {"info", "route"},
}  # fmt: skip
ops = torch.ops.nccl_ep


def _case(num_ranks: int, layout: str, quant: str | None = None, **changes: Any) -> Expected:
    return Expected(
        plain_case(
            num_ranks, layout=layout, quant=quant, expert_alignment=4 if layout == "packed" else 1,
            combine_weights="dispatch", zero_padding=True, **changes,
        )
    )  # fmt: skip


class Calls:
    """Arguments of every op for one case on one buffer, after a dispatch whose handle the combines use."""

    def __init__(self, case: Expected, buffer: nccl_ep.Buffer) -> None:
        shape, given = case.case, case.inputs[buffer.rank]
        self.buffer = buffer
        self.out = nccl_ep.dispatch(
            given.x, given.topk_idx, given.topk_weights, buffer=buffer, scales=given.scales, **shape.dispatch_kwargs()
        )
        handle, layout = self.out.handle, LAYOUTS[shape.layout]
        head = (buffer._seq,)
        fields = {
            "alignment": shape.expert_alignment, "quant": QUANTS[shape.quant], "zero_padding": shape.zero_padding,
        }  # fmt: skip
        config = (handle.capacity, pack_dispatch(handle.routing() | fields))
        scales = given.scales
        row = (
            given.x.dtype, shape.hidden, 0 if scales is None else scales.shape[1],
            torch.float32 if scales is None else scales.dtype, len(given.x),
            given.topk_idx.dtype == torch.int64,
        )  # fmt: skip
        sizes = combine_args(handle, int(layout.has_expert_rows))  # to float32, another type than the rows'
        rows = case.rows[buffer.rank]
        biases = [given.x.float()] if shape.layout == "flat" else []
        dispatch = (*head, given.x, scales, given.topk_idx, given.topk_weights, *config)
        combine = (*head, rows, handle.tensor, None, None, biases, *sizes)
        self.args: dict[str, tuple[Any, ...]] = {
            "ll_dispatch": dispatch,
            "ll_dispatch_send": dispatch,
            "ll_dispatch_recv": (*head, handle.tensor.clone(), *row, *config, None, None),
            "ll_combine": combine,
            "ll_combine_out": (*combine, torch.zeros(len(given.x), shape.hidden)),
            "ll_combine_send": (*combine, None),
            "ll_combine_recv": (*head, handle.tensor, biases, rows.dtype, shape.hidden, *sizes, *[None] * 4),
            "ll_combine_weights": (*head, case.values[buffer.rank], handle.tensor, *sizes),
            "require_no_overflow": (*head, self.out._info, *config),
            "row_carrier": (*head, given.x, handle.tensor, None, list(self.out.x.shape), config[1]),
        }
        outs = [torch.zeros_like(tensor) for tensor in ops.ll_dispatch.default(*dispatch)]
        self.args["ll_dispatch_out"] = (*dispatch, *outs)
        self.args["ll_dispatch_recv_out"] = (*self.args["ll_dispatch_recv"][:-2], *map(torch.zeros_like, outs[:-1]))
        self.args["ll_combine_recv_out"] = (*self.args["ll_combine_recv"][:-4], torch.zeros(len(given.x), shape.hidden))


def _check(name: str, calls: Calls, util: str) -> None:
    """opcheck of one op, which runs it more than once. A send needs its receive behind each run, a receive its send
    before: of these opcheck gets what runs them once."""
    args = calls.args[name]
    if "_recv" in name:
        send = name.partition("_recv")[0] + "_send"
        sent = getattr(ops, send).default(*calls.args[send])
        if sent is not None:
            args = (*args[:1], sent, *args[2:])
    torch.library.opcheck(getattr(ops, name).default, args, test_utils=util)
    if name.endswith("_send"):
        recv = calls.args[name.replace("_send", "_recv")]
        getattr(ops, name.replace("_send", "_recv")).default(*recv)


def test_these_are_all_the_ops() -> None:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("nccl_ep::")}
    assert names == {*OPS, *DEEPEP_OPS, *HT_OPS, *EXACT_OPS, *LOCAL_OPS, *ARRIVAL_OPS, *BESIDE_OPS, *SIGNALLED_OPS}


@pytest.mark.parametrize("name", OPS + DEEPEP_OPS + HT_OPS + EXACT_OPS)
def test_schemas_have_tensors_and_numbers_and_change_the_buffer(name: str) -> None:
    """Only tensors and numbers cross, and the tensor that stands for the buffer is changed by all."""
    schema = getattr(ops, name).default._schema
    assert schema.arguments[0].name == "seq" and str(schema.arguments[0].type) == "Tensor"
    assert schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write
    kinds = {str(argument.type) for argument in schema.arguments[1:]}
    assert kinds <= {"Tensor", "Optional[Tensor]", "List[Tensor]", "int", "bool", "float", "List[int]"}
    changed = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    outs = {"seq"} | WRITE.get(name, set())
    assert {each for each in changed if not each.startswith("out")} == outs
    assert schema.is_mutable
    for result in schema.returns:
        assert result.alias_info is None, "results are new tensors"
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"nccl_ep::{name}", key), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_over_what_is_read(layout: str) -> None:
    case = _case(1, layout)
    with make_buffer(case.case, None) as buffer:
        calls = Calls(case, buffer)
        check_apart("ll_dispatch_out", calls.args["ll_dispatch_out"], ("x", "x_scales", "topk_idx", "topk_weights"))
        check_apart("ll_combine_out", calls.args["ll_combine_out"], ("rows", "handle", "biases"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_opcheck_passes_for_each_op_on_one_rank(name: str, layout: str) -> None:
    case = _case(1, layout)
    with make_buffer(case.case, None) as buffer:
        calls = Calls(case, buffer)
        with apart_from_numbers(calls.out.handle):
            for util in UTILS[:3] if name in SPLIT else UTILS:
                if name in SPLIT and util == "test_autograd_registration":
                    torch.library.opcheck(getattr(ops, name).default, calls.args[name], test_utils=util)
                    continue
                _check(name, calls, util)
        case.run(buffer)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_calls_pass_aot_autograd(layout: str, dynamic: bool) -> None:
    """Send and receive in one traced function: what opcheck does for an op by itself."""
    case = _case(1, layout)
    with make_buffer(case.case, None) as buffer:
        calls = Calls(case, buffer)
        names = ("ll_dispatch_send", "ll_combine_send", "ll_dispatch_recv", "ll_combine_recv")
        leaves, spec = pytree.tree_flatten([calls.args[name] for name in names])
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())

        def both(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            traced = {id(tensor): each for tensor, each in zip(tensors, given, strict=True)}
            args = pytree.tree_unflatten([traced.get(id(leaf), leaf) for leaf in leaves], spec)
            handle = ops.ll_dispatch_send.default(*args[0])
            ops.ll_combine_send.default(*args[1])
            outs = ops.ll_dispatch_recv.default(*args[2][:1], handle, *args[2][2:])
            return (*outs, ops.ll_combine_recv.default(*args[3]))

        with apart_from_numbers(calls.out.handle):
            aot_autograd_check(both, tensors, {}, dynamic, check_gradients=False)
        case.run(buffer)


@pytest.mark.parametrize("name", OPS)
def test_opcheck_passes_for_two_ranks_in_lockstep(name: str) -> None:
    case = _case(2, "packed")

    def body(group: ThreadGroup) -> None:
        with make_buffer(case.case, group) as buffer:
            calls = Calls(case, buffer)
            for util in ("test_schema", "test_faketensor"):
                _check(name, calls, util)
            case.run(buffer)

    run_ranks(2, body)


def _deepep_calls(buffer: nccl_ep.Buffer, quant: str | None, scales: Any = None) -> dict[str, tuple[Any, ...]]:
    """Arguments of the ops of DeepEP's convention; receives without what the sending ones return."""
    head = (buffer._seq,)
    x, ids = torch.randn(6, 640).bfloat16(), torch.randint(-1, 4, (6, 3))
    stats, waits = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    numbers = (4, 6, int(QUANTS[quant]), stats, waits, 0)
    dispatch = (*head, x, scales, ids, *numbers)
    rows, _, _, _, src_info, _ = ops.ll_dispatch_deepep.default(*dispatch)
    combine = (*head, rows.bfloat16(), src_info, torch.rand(6, 3), ids, 4, 6, waits)
    out = torch.empty(6, 640).bfloat16()
    return {
        "ll_dispatch_deepep": dispatch,
        "ll_dispatch_deepep_send": dispatch,
        "ll_dispatch_deepep_recv": (torch.bfloat16, 6, 3, True, *numbers),
        "ll_combine_deepep": (*combine, None, 0, True),
        "ll_combine_deepep_send": (*combine, out, 1, False, torch.ones(4, 1, dtype=torch.int32), 6, 1),
        "ll_combine_deepep_recv": (*head, src_info, 3, 4, 6, waits, out, 0, False),
    }


@pytest.mark.parametrize(("quant", "width"), [*((quant, 0) for quant in DEEPEP_QUANTS), (None, 3)])
def test_opcheck_passes_for_the_ops_of_deepeps_convention(quant: str | None, width: int) -> None:
    """opcheck runs an op more than once and copies its arguments: not for split calls, nor for combine, whose
    src_info has the handle behind it. width: of the caller's scales."""
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=6, hidden=640, topk=3, num_experts=4, device="cpu", timeout=60.0, late_weights=True
    ) as buffer:
        scales = torch.arange(6 * width, dtype=torch.int32).view(6, width) if width else None
        calls = _deepep_calls(buffer, quant, scales)
        for kind in ("dispatch", "combine"):
            fused, send, recv = (f"ll_{kind}_deepep{part}" for part in ("", "_send", "_recv"))
            if kind == "dispatch":
                for util in ("test_schema", "test_autograd_registration", "test_faketensor"):
                    torch.library.opcheck(getattr(ops, fused).default, calls[fused], test_utils=util)
            for name in (fused, send):
                sent = getattr(ops, name).default(*calls[name])
                assert faked(name, calls[name]) == described(sent)
            received = calls[recv] if kind == "combine" else (*calls[send][:1], *sent, *calls[recv])
            with FakeTensorMode() as mode:
                assert getattr(ops, recv).default(*(as_fake(mode, each) for each in received)) is None
            getattr(ops, recv).default(*received)


@pytest.mark.parametrize("quant", [-1, *(int(value) for name, value in QUANTS.items() if name not in DEEPEP_QUANTS)])
def test_what_deepeps_convention_does_not_quantise_is_refused(quant: int) -> None:
    with nccl_ep.Buffer.for_shapes(None, max_tokens=6, hidden=640, topk=3, num_experts=4, device="cpu") as buffer:
        x, ids = torch.randn(6, 640).bfloat16(), torch.zeros(6, 3, dtype=torch.int64)
        numbers = (4, 6, quant, None, None, 0)
        sent: tuple[Any, ...] = (x, None, ids, *numbers)
        made = ops.ll_dispatch_deepep.default(buffer._seq, x, None, ids, *numbers[:2], 0, *numbers[3:])
        received: tuple[Any, ...] = (*made, torch.bfloat16, 6, 3, True, *numbers)
        for part, args in {"": sent, "_send": sent, "_recv": received}.items():
            with pytest.raises(ValueError, match=rf"quant is {quant}, must be from 0 to 3: DeepEP's scales"):
                getattr(ops, f"ll_dispatch_deepep{part}").default(buffer._seq, *args)
        assert buffer.stats()["dispatches"] == 1


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fakes_are_what_the_ops_return(layout: str, quant: str | None) -> None:
    """Shapes, types and strides, of two ranks; with scales of the caller where nothing quantises."""
    scales = {"scales_dtype": torch.int32, "scales_width": 3} if quant is None else {}
    cases = [
        _case(2, layout, quant, hidden=640),
        _case(2, layout, quant, hidden=640, tokens=(3, 0), idx_dtype=torch.int32, **scales),
    ]

    def body(group: ThreadGroup) -> None:
        for case, world in zip(cases, worlds, strict=True):
            with make_buffer(case.case, world[group.rank()]) as buffer:
                calls = Calls(case, buffer)
                fakes, sent = {name: faked(name, calls.args[name]) for name in OPS}, None
                for name in OPS:
                    args = list(calls.args[name])
                    if name.endswith("_recv_out"):
                        send = name.replace("_recv_out", "_send")
                        sent = getattr(ops, send).default(*calls.args[send])
                    if name.startswith("ll_dispatch_recv"):
                        args[1] = sent
                    result = getattr(ops, name).default(*args)
                    assert fakes[name] == described(result), name
                    if name == "ll_dispatch_send":
                        sent = result

    worlds = [ThreadGroup.make(2), ThreadGroup.make(2)]
    run_ranks(2, body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes_of_a_thread_change_nothing(mode: Any) -> None:
    case = _case(2, "expert_major")

    def body(group: ThreadGroup) -> None:
        with make_buffer(case.case, group) as buffer:
            with mode():  # of this thread
                case.run(buffer)
                case.run(buffer, staged=True)
            case.run(buffer)
            assert buffer._seq.shape[1:] == (2, 2, 0)

    run_ranks(2, body)


def test_functionalization_keeps_and_orders_the_ops() -> None:
    """Results that nobody reads do not make an op go away, and the order of calls is that of the program."""
    case = _case(1, "flat")
    seen: list[list[str]] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        seen.append([name.split(".")[1] for name in targets if name.startswith("nccl_ep.")])
        return graph

    with make_buffer(case.case, None) as buffer:
        calls = Calls(case, buffer)
        dispatch, combine = calls.args["ll_dispatch"], calls.args["ll_combine"]

        def program(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            ops.ll_dispatch.default(*dispatch[:1], x, *dispatch[2:])  # unused
            ops.ll_dispatch.default(*dispatch[:1], x, *dispatch[2:])  # the same again
            first = ops.ll_combine.default(*combine[:1], rows, *combine[2:])
            ops.ll_combine_weights.default(*calls.args["ll_combine_weights"])
            return first

        before = buffer.stats()
        compiled = torch.compile(program, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
        y = compiled(dispatch[1], combine[1])
        after = buffer.stats()
    assert not reference.first_difference(y, program_result(case))
    assert after["dispatches"] - before["dispatches"] == 2
    assert after["combines"] - before["combines"] == 2
    assert len(seen) == 1


def program_result(case: Expected) -> torch.Tensor:
    """What combine gives in `Calls`: the bias first, all in float32."""
    bias = [(given.x.float(),) for given in case.inputs]
    return reference.combine(
        case.rows, case.results, case.inputs, num_experts=case.case.num_experts, layout=case.case.layout,
        weights="dispatch", topk_idx=None, bias=bias, out_dtype=torch.float32, wire_dtype=torch.float32,
        domain_size=None,
    )[0]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_layer_gives_the_eager_bits(layout: str, backend: str) -> None:
    case = _case(1, layout)
    given = case.inputs[0]
    with make_buffer(case.case, None) as buffer:

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.case.dispatch_kwargs())
            return nccl_ep.combine(out.x * 2, out.handle)

        check_compiled(layer, (given.x, given.topk_idx, given.topk_weights), backend)


@pytest.mark.parametrize("how", [{"mode": "ll"}, {"mode": "ht"}, {"mode": "ht", "capacity": "exact"}], ids=str)
def test_one_compilation_serves_any_number_of_tokens(how: dict[str, Any]) -> None:
    case = plain_case(1, layout="packed")
    with make_buffer(case, None, mode="auto") as buffer:

        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, **case.dispatch_kwargs() | how)
            return nccl_ep.combine(out.x * 2, out.handle)

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        for num_tokens in (8, 5, 3, 7):
            x, scores = torch.randn(num_tokens, case.hidden).to(case.dtype), torch.rand(num_tokens, case.num_experts)
            weights, ids = scores.topk(case.topk)
            assert not reference.first_difference(compiled(x, ids, weights), layer(x, ids, weights))
        assert counter.frame_count == 1
