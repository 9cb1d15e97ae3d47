"""What an op writes into is marked as changed: a graph that has saved it raises in its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import nccl_ep
from nccl_ep import _C
from nccl_ep import nvidia as ep
from nccl_ep.config import cached_args, combine_args, pack_dispatch
from nccl_ep.deep_ep import Buffer as DeepEp
from nccl_ep.handle import LAYOUTS
from nccl_ep.placement import map_experts
from tests.nvidia.tokens import EXPERTS, HIDDEN, MOST, alone

T, H, K, E = 4, 64, 2, 4
IDS = torch.tensor([[0, 1], [1, 2], [0, 3], [3, 0]])
ops = torch.ops.nccl_ep
Args = tuple[Any, ...]


def make_buffer() -> nccl_ep.Buffer:
    return nccl_ep.Buffer.for_shapes(
        None, max_tokens=T, hidden=H, topk=K, num_experts=E, dtype=torch.float32, device="cpu", timeout=60.0,
        mode="auto", late_weights=True,
    )  # fmt: skip


@pytest.fixture
def buffer() -> Iterator[nccl_ep.Buffer]:
    with make_buffer() as made:
        yield made


class Calls:
    """Arguments of every op that writes, and what must run before one and behind it."""

    def __init__(self, buffer: nccl_ep.Buffer) -> None:
        seq, x, weights = buffer._seq, torch.ones(T, H), torch.rand(T, K)
        self.buffer, self.seq, self.x, self.weights, self.ids = buffer, seq, x, weights, IDS.clone()
        self.waits, self.stats = torch.zeros(1, dtype=torch.int64), torch.zeros(E, dtype=torch.int32)
        self.load = torch.zeros(3, dtype=torch.int64)
        self.deepep = (seq, x, None, self.ids, E, T, 0, self.stats, self.waits, 0)

    def _config(self, **fields: Any) -> tuple[int, ...]:
        return pack_dispatch({"num_experts": E, "topk": K, "max_tokens": T, "zero_padding": True, **fields})

    def _dispatch(self, x: Any = None) -> Args:
        return self.seq, self.x if x is None else x, None, self.ids, self.weights, T, self._config()

    def _combine(self, mode: Any) -> Args:
        made = nccl_ep.dispatch(
            self.x, self.ids, self.weights, buffer=self.buffer, num_experts=E, max_tokens=T, layout="packed", mode=mode
        )
        handle, sizes = made.handle, combine_args(made.handle)
        rows = torch.ones_like(made.x)
        if mode == "ll":
            return self.seq, rows, handle.tensor, None, None, [], *sizes, torch.empty(T, H)
        return self.seq, rows, None, handle.tensor, handle.slots, None, None, [], *sizes, torch.empty(T, H)

    def ll_dispatch_out(self) -> Args:
        return *self._dispatch(), *map(torch.zeros_like, ops.ll_dispatch.default(*self._dispatch()))

    def ll_dispatch_recv(self) -> Args:
        handle = ops.ll_dispatch_send.default(*self._dispatch())
        return self.seq, handle, torch.float32, H, 0, torch.float32, T, True, T, self._config(), None, None

    def ll_dispatch_recv_out(self) -> Args:
        outs = map(torch.zeros_like, ops.ll_dispatch.default(*self._dispatch())[:-1])
        return *self.ll_dispatch_recv()[:-2], *outs

    def ll_combine_recv_out(self) -> Args:
        seq, rows, handle, *how, out = self._combine("ll")
        ops.ll_combine_send.default(seq, rows, handle, *how, None)
        return seq, handle, [], rows.dtype, H, *how[3:], out

    def ll_combine_out(self) -> Args:
        return self._combine("ll")

    def ll_dispatch_deepep(self) -> Args:
        return self.deepep

    def ll_dispatch_deepep_send(self) -> Args:
        return self.deepep

    def ll_dispatch_deepep_recv(self) -> Args:
        made = ops.ll_dispatch_deepep_send.default(*self.deepep)
        return self.seq, *made, torch.float32, T, K, True, *self.deepep[4:]

    def ll_combine_deepep(self) -> Args:
        made = ops.ll_dispatch_deepep.default(*self.deepep)
        out = torch.empty(T, H)
        return self.seq, made[0], made[4], self.weights, self.ids, E, T, self.waits, out, 0, False

    def ll_combine_deepep_send(self) -> Args:
        return *self.ll_combine_deepep(), None, 0, 0

    def ll_combine_deepep_recv(self) -> Args:
        sent = self.ll_combine_deepep_send()
        ops.ll_combine_deepep_send.default(*sent)
        return self.seq, sent[2], K, E, T, self.waits, sent[8], 0, False

    def ht_dispatch_out(self) -> Args:
        args = self._dispatch([self.x, torch.ones(T, 4)])
        made = [torch.zeros_like(each) for each in ops.ht_dispatch.default(*args)]
        return *args, [made[0], made[8]], *made[1:8]

    def ht_dispatch_routed(self) -> Args:
        *args, _, _ = self._dispatch([self.x])
        config = self._config(layout=int(LAYOUTS["flat"]))
        info, route, sizes = ops.ht_route.default(*args, config)
        return *args, info, route, ops.size_at(sizes, 0), ops.size_at(sizes, 1), config

    def ht_dispatch_cached_out(self) -> Args:
        made = nccl_ep.dispatch(
            self.x, self.ids, buffer=self.buffer, num_experts=E, max_tokens=T, layout="packed", mode="ht"
        )
        handle = made.handle
        args = (self.seq, [self.x], None, handle.tensor, handle.slots, *cached_args(handle, 0, True))
        return *args, [torch.empty_like(made.x)], torch.empty(0)

    def ht_combine_out(self) -> Args:
        return self._combine("ht")

    def map_experts(self) -> Args:
        return self.ids % 3, torch.tensor([[0], [1], [2]]), torch.ones(3, dtype=torch.int64), 0, self.load

    def finish(self, name: str, args: Args, result: Any) -> None:
        """The receive of what was only sent."""
        if name == "ll_dispatch_deepep_send":
            ops.ll_dispatch_deepep_recv.default(self.seq, *result, torch.float32, T, K, True, *args[4:])
        elif name == "ll_combine_deepep_send":
            ops.ll_combine_deepep_recv.default(self.seq, args[2], K, E, T, args[7], args[8], 0, False)


def changes(name: str) -> list[int]:
    """Which arguments the schema says that the op writes, without `seq`."""
    arguments = getattr(ops, name).default._schema.arguments
    return [i for i, each in enumerate(arguments) if each.alias_info is not None and each.name != "seq"]


WRITING = [name for name in _C.op_names() if changes(name)]


def tensors_of(args: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]


def written_by(name: str, args: Args) -> list[torch.Tensor]:
    return tensors_of([args[i] for i in changes(name)])


def versions(tensors: list[torch.Tensor]) -> list[int]:
    return [each._version for each in tensors]


def by_name(name: str, args: Args) -> Any:
    op = getattr(ops, name).default
    return op(**dict(zip((each.name for each in op._schema.arguments), args, strict=True)))


def past_python(name: str, args: Args) -> Any:
    """As others of torch's dispatcher call it: TorchScript, a compiler's C++."""
    return torch._C._get_operation_overload(f"nccl_ep::{name}", "")[0](*args)


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(name: str, args: Args) -> Any:
    with Nothing():
        return getattr(ops, name)(*args)


def without_gradients(name: str, args: Args) -> Any:
    with torch.no_grad():
        return getattr(ops, name)(*args)


WAYS: dict[str, Callable[[str, Args], Any]] = {
    "packet": lambda name, args: getattr(ops, name)(*args),
    "overload": lambda name, args: getattr(ops, name).default(*args),
    "by name": by_name,
    "past Python": past_python,
    "under a mode": under_a_mode,
    "without gradients": without_gradients,
}


def require_marks(name: str, way: str, buffer: nccl_ep.Buffer, inference: bool) -> None:
    """A call marks what it writes, once, and nothing else."""
    calls = Calls(buffer)
    args = getattr(calls, name)()
    written = written_by(name, args)
    others = tensors_of([each for i, each in enumerate(args) if i not in changes(name)])
    assert written and buffer._seq._version == 0
    before, apart = versions(written), versions(others)
    with torch.inference_mode(inference):
        result = WAYS[way](name, args)
    assert versions(written) == [each + 1 for each in before]
    assert versions(others) == apart and buffer._seq._version == 0
    calls.finish(name, args, result)


def test_all_ops_that_write_are_in_the_table() -> None:
    assert len(WRITING) == 16
    assert all(hasattr(Calls, name) for name in WRITING)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITING)
def test_what_an_op_writes_is_marked_once_and_nothing_else(name: str, way: str, buffer: nccl_ep.Buffer) -> None:
    require_marks(name, way, buffer, inference=False)


@pytest.mark.parametrize("name", WRITING)
def test_a_graph_that_has_saved_what_an_op_writes_raises(name: str, buffer: nccl_ep.Buffer) -> None:
    calls = Calls(buffer)
    args = getattr(calls, name)()
    factor = torch.ones((), requires_grad=True)
    products = [(each * factor).sum() for each in written_by(name, args)]
    calls.finish(name, args, getattr(ops, name).default(*args))
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITING)
def test_tensors_of_inference_mode_are_written(name: str, way: str, buffer: nccl_ep.Buffer) -> None:
    """Inside of the mode and outside of it, by whoever calls: they count nothing, and no graph can save them."""
    with torch.inference_mode():
        calls = Calls(buffer)
        for _ in range(2):
            args = getattr(calls, name)()
            assert all(each.is_inference() for each in written_by(name, args))
            calls.finish(name, args, WAYS[way](name, args))
        args = getattr(calls, name)()
    calls.finish(name, args, WAYS[way](name, args))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITING)
def test_inference_mode_marks_what_others_may_have_saved(name: str, way: str, buffer: nccl_ep.Buffer) -> None:
    require_marks(name, way, buffer, inference=True)


@pytest.mark.parametrize("name", ["ll_combine_out", "ht_combine_out", "ll_combine_deepep"])
def test_an_op_with_a_gradient_marks(name: str, buffer: nccl_ep.Buffer) -> None:
    args = list(getattr(Calls(buffer), name)())
    out = args[8] if name == "ll_combine_deepep" else args[-1]
    args[1] = args[1].clone().requires_grad_()
    saved = (out * torch.ones((), requires_grad=True)).sum()
    getattr(ops, name).default(*args)
    assert out.grad_fn is not None
    out.sum().backward()
    assert args[1].grad is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


class Wrapper(torch.Tensor):
    """Holds a tensor, which alone an op sees."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("way", ["packet", "overload", "by name"])
@pytest.mark.parametrize("name", WRITING)
def test_a_wrapper_is_marked_with_what_it_holds(name: str, way: str, buffer: nccl_ep.Buffer) -> None:
    calls = Calls(buffer)
    args = getattr(calls, name)()
    inner = written_by(name, args)
    wrapped = tuple(
        pytree.tree_map_only(torch.Tensor, Wrapper, each) if i in changes(name) else each for i, each in enumerate(args)
    )
    outer = tensors_of([wrapped[i] for i in changes(name)])
    before = versions(inner)
    result = WAYS[way](name, wrapped)
    assert versions(inner) == [each + 1 for each in before] and versions(outer) == [1] * len(outer)
    calls.finish(name, args, result)


# ---- The functions and methods


def test_every_function_of_python_marks(buffer: nccl_ep.Buffer) -> None:
    """Once each: the tensors that a caller gave to be written."""
    how: dict[str, Any] = {"buffer": buffer, "num_experts": E, "max_tokens": T, "layout": "packed"}
    calls, dest = Calls(buffer), torch.empty(T, H)
    x, ids, weights = calls.x, calls.ids, calls.weights
    ll, ht = (nccl_ep.dispatch(x, ids, weights, mode=mode, **how) for mode in ("ll", "ht"))
    assert ht.handle.slots is not None
    rows, payload = torch.ones_like(ht.x), nccl_ep.dispatch_cached(x, ht.handle)
    again = nccl_ep.dispatch(x, ids, weights, extra=[torch.ones(T, 4)], mode="ht", **how)
    view = DeepEp.of(make_buffer())
    received, _, handle, _, _ = view.low_latency_dispatch(x, ids, T, E, use_fp8=False)

    def hooked() -> None:
        *_, hook = view.low_latency_combine(received, ids, weights, handle, out=dest, return_recv_hook=True)
        before = dest._version
        hook()
        assert dest._version == before + 1

    writes: list[tuple[Callable[[], Any], list[torch.Tensor]]] = [
        (lambda: nccl_ep.combine(ll.x, ll.handle, out=dest), [dest]),
        (lambda: nccl_ep.combine(rows, ht.handle, out=dest), [dest]),
        (lambda: nccl_ep.dispatch_cached(x, ht.handle, out=payload), [payload.x]),
        (
            lambda: nccl_ep.dispatch(x, ids, weights, extra=[torch.ones(T, 4)], out=again, mode="ht", **how),
            [again.x, *again.extra, again.weights, again._info, again.handle.tensor],
        ),
        (lambda: view.low_latency_combine(received, ids, weights, handle, out=dest), [dest]),
        (
            lambda: view.low_latency_combine(
                received, ids, weights, handle, out=dest, combine_wait_recv_cost_stats=calls.waits
            ),
            [dest, calls.waits],
        ),
        (
            lambda: view.low_latency_dispatch(
                x, ids, T, E, use_fp8=False, cumulative_local_expert_recv_stats=calls.stats,
                dispatch_wait_recv_cost_stats=calls.waits,
            ),
            [calls.stats, calls.waits],
        ),
        (lambda: map_experts(ids % 3, *calls.map_experts()[1:3], rank=0, load=calls.load), [calls.load]),
    ]  # fmt: skip
    for write, written in writes:
        before = versions(written)
        write()
        assert versions(written) == [each + 1 for each in before]
    hooked()
    assert buffer._seq._version == view._seq._version == 0
    view.destroy()


@pytest.mark.parametrize("algorithm", ["LOW_LATENCY", "HIGH_THROUGHPUT"])
def test_what_nvidias_calls_write_is_marked(algorithm: str) -> None:
    """Rows and weights of a dispatch, sums of a combine."""
    ht = algorithm == "HIGH_THROUGHPUT"
    x, home, ids = (
        torch.ones(MOST, HIDDEN).bfloat16(),
        torch.empty(MOST, HIDDEN).bfloat16(),
        torch.zeros(MOST, 1).long(),
    )
    sizes = (MOST,) if ht else (EXPERTS, MOST)
    rows, weights = torch.empty(*sizes, HIDDEN).bfloat16(), torch.empty(sizes)
    written = [rows, weights, home] if ht else [rows, home]
    given, received = {"tokens": ep.Tensor(x)}, {"tokens": ep.Tensor(rows)}
    if ht:
        given["topk_weights"], received["topk_weights"] = ep.Tensor(torch.ones(MOST, 1)), ep.Tensor(weights)
    factor = torch.ones((), requires_grad=True)
    info = None if ht else ep.LayoutInfo(expert_counters=ep.Tensor(torch.zeros(EXPERTS, dtype=torch.int32)))
    with alone(algorithm=ep.Algorithm[algorithm]) as group:
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(ids), stream=0)
        saved = [(each * factor).sum() for each in written]
        handle.dispatch(ep.DispatchInputs(**given), ep.DispatchOutputs(**received), layout_info=info, stream=0)
        handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(rows)), ep.CombineOutputs(tokens=ep.Tensor(home)), stream=0
        )  # fmt: skip
    for each in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.backward()


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_tensors_of_inference_mode_are_written_by_functions(mode: Any, buffer: nccl_ep.Buffer) -> None:
    with torch.inference_mode():
        out, x = torch.empty(T, H), torch.ones(T, H)
        made = nccl_ep.dispatch(x, IDS, buffer=buffer, num_experts=E, max_tokens=T, layout="packed", mode=mode)
        nccl_ep.combine(made.x, made.handle, weights=None, out=out)
        wanted = out.clone()
        out.zero_()
    nccl_ep.combine(made.x, made.handle, weights=None, out=out)
    assert torch.equal(out, wanted)
    if mode == "ht":
        nccl_ep.dispatch(x, IDS, buffer=buffer, num_experts=E, max_tokens=T, layout="packed", mode="ht", out=made)
        nccl_ep.dispatch_cached(x, made.handle, out=nccl_ep.dispatch_cached(x, made.handle))


# ---- Compiled


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_compiled_calls_mark(mode: Any, backend: str, buffer: nccl_ep.Buffer) -> None:
    """In one graph, as torch's own operations. `seq` keeps its version, but with aot_eager, which copies into it."""
    made = nccl_ep.dispatch(
        torch.ones(T, H), IDS, buffer=buffer, num_experts=E, max_tokens=T, layout="packed", mode=mode
    )
    out, rows = torch.zeros(T, H), torch.ones_like(made.x)

    def layer(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return nccl_ep.combine(rows, made.handle, weights=None, out=out) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(2):
        saved = (out * torch.ones((), requires_grad=True)).sum()
        result = compiled(rows, out)
        assert torch.equal(result, layer(rows, torch.zeros(T, H)))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
    assert backend == "aot_eager" or buffer._seq._version == 0


def test_what_an_op_saves_for_its_own_backward_is_marked_before(buffer: nccl_ep.Buffer) -> None:
    """Exact sizes, traced: `ht_dispatch_routed` writes into the handle, and its graph saves it."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        made = nccl_ep.dispatch(
            x, IDS, buffer=buffer, num_experts=E, max_tokens=T, layout="packed", mode="ht", capacity="exact"
        )
        return nccl_ep.combine(made.x * 3, made.handle, weights=None)

    torch._dynamo.reset()
    x = torch.ones(T, H, requires_grad=True)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((T, H), 6.0))
