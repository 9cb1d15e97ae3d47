"""torch.compile(fullgraph=True) of layers that are trained: forward and backward, no graph break, no recompilation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import nccl_ep
from tests.support.processes import run_processes
from tests.training.moe import EXPERT_LAYOUTS, EXPERTS, HIDDEN, TOPK, apply_experts, make_buffer

BACKENDS = ("eager", "aot_eager", "inductor")
KINDS: dict[str, dict[str, Any]] = {
    "ll expert_major": {"mode": "ll", "layout": "expert_major"},
    "ll packed": {"mode": "ll", "layout": "packed"},
    "ll flat": {"mode": "ll", "layout": "flat"},
    "ht expert_major": {"mode": "ht", "layout": "expert_major", "capacity": 64},
    "ht packed": {"mode": "ht", "layout": "packed"},
    "ht rank_major": {"mode": "ht", "layout": "rank_major"},
    "ht packed, exact": {"mode": "ht", "layout": "packed", "capacity": "exact"},
    "ht flat, exact": {"mode": "ht", "layout": "flat", "capacity": "exact"},
}


def with_inductor(kinds: list[str], quick: str, *backends: str) -> list[Any]:
    """(backend, kind) of all.

    In `make test`, Inductor, which calls g++ each time, has ``quick`` alone. So has Dynamo alone where AOTAutograd,
    which takes its graphs, has all.
    """
    few = ("inductor", "eager") if "aot_eager" in backends else ("inductor",)
    return [
        pytest.param(
            backend, kind, id=f"{backend}-{kind}",
            marks=pytest.mark.slow if backend in few and kind != quick else (),
        )
        for kind in kinds
        for backend in (*backends, "inductor")
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    """A router and this rank's experts."""

    def __init__(self, buffer: nccl_ep.Buffer, weighting: str = "dispatch", split: bool = False, **how: Any) -> None:
        super().__init__()
        self.buffer, self.how, self.weighting, self.split = buffer, how, weighting, split
        generator = torch.Generator().manual_seed(1)
        self.router = torch.nn.Parameter(torch.randn(HIDDEN, EXPERTS, generator=generator))
        local = EXPERTS // buffer.num_ranks
        self.experts = torch.nn.Parameter(torch.randn(local, HIDDEN, HIDDEN, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, idx = (x @ self.router).softmax(-1).topk(TOPK)
        args: dict[str, Any] = {"buffer": self.buffer, "num_experts": EXPERTS, "zero_padding": True} | self.how
        if self.split:
            out = nccl_ep.dispatch_send(x, idx, weights, **args).receive()
        else:
            out = nccl_ep.dispatch(x, idx, weights, **args)
        rows = apply_experts(out, self.experts)
        given: dict[str, Any] = {}
        if self.how["layout"] in EXPERT_LAYOUTS and self.weighting == "home":
            given = {"weights": weights}
        if self.split:
            return nccl_ep.combine_send(rows, out.handle, **given).receive()
        return nccl_ep.combine(rows, out.handle, **given)


def train_step(layer: torch.nn.Module, x: torch.Tensor, mark: bool = False) -> list[torch.Tensor]:
    """Its result, and the gradients of x and the parameters."""
    leaf = x.clone().requires_grad_()
    if mark:
        nccl_ep.mark_tokens(leaf)
    layer.zero_grad()
    out = layer(leaf)
    out.sin().sum().backward()
    grads = [leaf.grad, *(each.grad for each in layer.parameters())]
    return [out.detach(), *(each.clone() for each in grads if each is not None)]


def check_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want) == 4
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("backend", "kind"), with_inductor(list(KINDS), "ht packed, exact", "eager", "aot_eager"))
def test_layers_with_a_buffer_each_compile_once(backend: str, kind: str) -> None:
    """One compilation for a number of tokens, one for any number; more buffers and numbers need none."""
    counter = CompileCounterWithBackend(backend)
    for i in range(10):
        with make_buffer(None, max_tokens=32) as buffer:
            layer = Layer(buffer, **KINDS[kind])
            x = torch.randn(5 + i, HIDDEN)
            want = train_step(layer, x)
            layer.compile(backend=counter, fullgraph=True)
            check_equal(train_step(layer, x), want)
            if i == 1:
                torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False
    assert counter.frame_count <= 2


@pytest.mark.parametrize("how", [{"weighting": "home"}, {"split": True}, {"split": True, "weighting": "home"}])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_layer_trains_alike_by_every_way_of_calling(backend: str, how: dict[str, Any]) -> None:
    with make_buffer(None) as buffer:
        layer = Layer(buffer, **how, **KINDS["ll packed"])
        x = torch.randn(5, HIDDEN)
        want = train_step(layer, x)
        layer.compile(backend=backend, fullgraph=True)
        check_equal(train_step(layer, x), want)


@pytest.mark.parametrize(
    ("backend", "kind"),
    with_inductor(["ll expert_major", "ht packed", "ht packed, exact"], "ll expert_major", "aot_eager"),
)
def test_a_compiled_layer_of_two_ranks_trains_as_the_eager_one(backend: str, kind: str, tmp_path: Path) -> None:
    """In processes: what Dynamo has compiled in one thread, it keeps from others."""
    run_processes(2, _train_compiled, tmp_path, backend, kind)


def _train_compiled(rank: int, backend: str, kind: str) -> None:
    with make_buffer(dist.group.WORLD) as buffer:
        layer = Layer(buffer, **KINDS[kind])
        x = torch.randn(3 + 2 * rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
        want = train_step(layer, x)
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = compiled(leaf)
        out.sin().sum().backward()
        got = [out.detach(), leaf.grad, *(each.grad for each in layer.parameters())]
        check_equal([each for each in got if each is not None], want)


def test_a_compiled_model_with_a_loop_over_layers_trains_alike() -> None:
    """A buffer for all of them, or one each."""
    with make_buffer(None) as one, make_buffer(None) as two:
        layers = torch.nn.Sequential(*(Layer(buffer, **KINDS["ht packed"]) for buffer in (one, two, one, two)))
        x = torch.randn(6, HIDDEN)

        def step(model: Any) -> list[torch.Tensor]:
            leaf = x.clone().requires_grad_()
            layers.zero_grad()
            model(leaf).sum().backward()
            grads = [leaf.grad, *(each.grad for each in layers.parameters())]
            return [each.clone() for each in grads if each is not None]

        want = step(layers)
        got = step(torch.compile(layers, fullgraph=True))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "kind"), with_inductor(["ll packed", "ht packed", "ht packed, exact"], "ht packed", "eager")
)
def test_blocks_that_are_compiled_one_by_one_share_a_buffer(backend: str, kind: str) -> None:
    """Another block's calls between a block's forward pass and its backward pass do not matter.

    With aot_eager they do, as it runs the copy that stands for a changed input, and autograd sees that.
    """
    with make_buffer(None) as buffer:
        layers = torch.nn.Sequential(*(Layer(buffer, **KINDS[kind]) for _ in range(3)))
        x = torch.randn(6, HIDDEN)

        def step() -> list[torch.Tensor]:
            leaf = x.clone().requires_grad_()
            layers.zero_grad()
            layers(leaf).sum().backward()
            grads = [leaf.grad, *(each.grad for each in layers.parameters())]
            return [each.clone() for each in grads if each is not None]

        want, before = step(), buffer._seq._version
        for layer in layers:
            layer.compile(backend=backend, fullgraph=True)
        for a, b in zip(step(), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert buffer._seq._version == before


class Own(torch.autograd.Function):
    """A user's own function over the calls, with a handle of tensors on its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, idx: torch.Tensor, buffer: nccl_ep.Buffer) -> torch.Tensor:
        out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=EXPERTS, layout="packed", zero_padding=True)
        ctx.save_for_backward(idx)
        ctx.buffer = buffer
        return nccl_ep.combine(out.x, out.handle, weights=None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (idx,) = ctx.saved_tensors
        out = nccl_ep.dispatch(
            grad.contiguous(), idx, buffer=ctx.buffer, num_experts=EXPERTS, layout="packed", zero_padding=True
        )
        return nccl_ep.combine(out.x, out.handle, weights=None), None, None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_of_the_users_own_has_its_gradient_compiled(backend: str) -> None:
    with make_buffer(None) as buffer:
        x, idx = torch.randn(5, HIDDEN), torch.rand(5, EXPERTS).topk(TOPK)[1]

        def layer(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = Own.apply(x.sin(), idx, buffer)  # type: ignore[no-untyped-call]
            return result

        grads = []
        for run in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
            leaf = x.clone().requires_grad_()
            run(leaf).sum().backward()
            assert leaf.grad is not None
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)


def test_overlap_survives_compilation() -> None:
    """What stands between send and receive stays there in the code that Inductor makes, if it is told so."""
    from torch._inductor.utils import run_and_get_code  # ranks of other tests import this module

    with make_buffer(None) as buffer:
        idx, w = torch.rand(5, EXPERTS).topk(TOPK)[1], torch.randn(HIDDEN, HIDDEN)

        def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            pending = nccl_ep.dispatch_send(x, idx, buffer=buffer, num_experts=EXPERTS, layout="packed")
            beside = torch.mm(x, w)
            out = pending.receive()
            home = nccl_ep.combine_send(out.x, out.handle, weights=None)
            more = torch.mm(beside, w)
            return home.receive(), more

        x = torch.randn(5, HIDDEN)
        want = layer(x)
        got, codes = run_and_get_code(torch.compile(layer, fullgraph=True, options=nccl_ep.KEEP_PROGRAM_ORDER), x)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        code = codes[0]
        places = [code.index(f"nccl_ep.{name}.default(") for name in (
            "ll_dispatch_send", "ll_dispatch_recv", "ll_combine_send", "ll_combine_recv",
        )]  # fmt: skip
        mms = [i for i in range(len(code)) if code.startswith("extern_kernels.mm(", i)]
        assert places == sorted(places) and len(mms) == 2
        assert places[0] < mms[0] < places[1] and places[2] < mms[1] < places[3]


def test_errors_keep_their_classes() -> None:
    buffer = make_buffer(None, on_overflow="raise")
    idx = torch.zeros(5, TOPK, dtype=torch.int64)

    def layer(x: torch.Tensor, capacity: int) -> torch.Tensor:
        out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=EXPERTS, capacity=capacity)
        return nccl_ep.combine(out.x, out.handle)

    x, compiled = torch.randn(5, HIDDEN), torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x, 16)
    with pytest.raises(nccl_ep.OverflowError, match=r"8 rows did not fit into capacity 2 .*demand was \[10, 0, 0, 0\]"):
        compiled(x, 2)
    buffer.destroy()
    with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
        compiled(x, 16)


def test_a_buffer_that_is_made_in_what_is_compiled() -> None:
    """It is made as outside of it; with fullgraph=True torch says why that cannot be."""
    x, idx = torch.randn(5, HIDDEN), torch.arange(5 * TOPK).view(5, TOPK) % EXPERTS

    def layer(x: torch.Tensor) -> torch.Tensor:
        with make_buffer(None) as buffer:
            out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=EXPERTS)
            return nccl_ep.combine(out.x, out.handle)

    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a buffer is made outside of what is compiled"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)


def test_what_a_buffer_has_not_got_may_be_asked_in_what_is_compiled() -> None:
    buffer = make_buffer(None)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if hasattr(buffer, "dispatch") or hasattr(buffer, "nothing") else x - 1

    x = torch.randn(5, HIDDEN)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), x - 1)
    buffer.destroy()


def test_a_buffer_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        buffer = make_buffer(None)
    layer = Layer(buffer, **KINDS["ll packed"])
    x = torch.randn(5, HIDDEN)
    want = train_step(layer, x)
    layer.compile(backend="aot_eager", fullgraph=True)
    check_equal(train_step(layer, x), want)
    buffer.destroy()
