"""Operations in one call of C++: modes, subclasses and gradients see the op, and results are the same."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.handle import DispatchOutput, Handle
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.support.op_checks import number_at, unnumbered

T, H, K, E = 6, 128, 2, 4
Call = Callable[[], Any]


class Subclass(torch.Tensor):
    pass


class Watching(TorchFunctionMode):
    """A mode that sees every function of torch, the op of a call among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def buffer() -> Iterator[nccl_ep.Buffer]:
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=T, hidden=H, topk=K, num_experts=E, wire_dtype=torch.float32, mode="auto", device="cpu",
        timeout=60.0,
    ) as made:  # fmt: skip
        yield made


def inputs(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator).bfloat16()
    return x, torch.randint(-1, E, (T, K), generator=generator), torch.rand(T, K, generator=generator)


def flat(value: Any, numbered: bool = True) -> list[Any]:
    """Tensors and numbers in what an operation returns; not ``numbered``: but of which dispatch a handle is."""
    if isinstance(value, DispatchOutput | Handle):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "seq"}
        if isinstance(value, Handle) and not numbered:
            parts["tensor"] = unnumbered(value.tensor, number_at(value))
        return [each for part in parts.values() for each in flat(part, numbered)]
    if isinstance(value, deep_ep.EventOverlap):
        return [value.event, value.extra_tensors]
    if isinstance(value, tuple | list):
        return [each for part in value for each in flat(part, numbered)]
    return [value]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """torch compares neither FP8 nor NaNs."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(mine: Any, theirs: Any) -> bool:
    left, right = flat(mine, numbered=False), flat(theirs, numbered=False)
    return len(left) == len(right) and all(
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and torch.equal(as_bytes(a), as_bytes(b))
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(left, right, strict=True)
    )


DISPATCHES: list[dict[str, Any]] = [
    {}, {"layout": "packed"}, {"layout": "packed", "expert_alignment": 4}, {"layout": "rank_major"},
    {"layout": "flat"}, {"quant": "fp8"}, {"capacity": 2}, {"zero_padding": True}, {"mode": "auto"},
    {"mode": "ht", "layout": "flat"}, {"mode": "ht", "layout": "flat", "capacity": "exact"},
    {"mode": "ht", "layout": "packed", "capacity": "exact", "expert_alignment": 4}, {"mode": "ht", "capacity": T},
    {"mode": "ht", "layout": "rank_major", "quant": "fp8"},
]  # fmt: skip


@pytest.mark.parametrize("options", DISPATCHES, ids=str)
def test_results_are_the_same_where_a_mode_sees_the_op(buffer: nccl_ep.Buffer, options: dict[str, Any]) -> None:
    x, ids, weights = inputs()
    how = {"buffer": buffer, "num_experts": E, "zero_padding": True} | options
    with Watching() as mode:
        wanted = nccl_ep.dispatch(x, ids, weights, **how)
    assert [each for each in mode.seen if "nccl_ep" in each] == [f"nccl_ep.{wanted.handle.mode}_dispatch.default"]
    out = nccl_ep.dispatch(x, ids, weights, **how)
    assert same(out, wanted)
    rows = torch.randn(out.x.shape).bfloat16()
    has_expert_rows = out.handle.layout.has_expert_rows
    kinds: list[dict[str, Any]] = [{}, {"weights": None}, {"out": torch.empty(T, H).bfloat16()}]
    kinds += [{"wire_dtype": torch.float32}, {"out_dtype": torch.float32}]
    if has_expert_rows:
        kinds += [{"weights": weights}, {"weights": weights, "topk_idx": ids}]
    elif options.get("layout") == "flat":
        kinds += [{"bias": x}, {"bias": [x, x]}]
    for kind in kinds:
        with Watching() as mode:
            home = nccl_ep.combine(rows, out.handle, **kind)
        assert any(f"nccl_ep.{out.handle.mode}_combine" in each for each in mode.seen)
        wanted_home = home.clone()
        mine = nccl_ep.combine(rows, out.handle, **kind)
        assert same(mine, wanted_home) and ("out" not in kind or mine is kind["out"])


def deepep_calls(view: deep_ep.Buffer) -> dict[str, Call]:
    x, ids, weights = inputs()
    per_rank, _, per_expert, is_in_rank, _ = view.get_dispatch_layout(ids, E)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in_rank}
    normal: dict[str, Any] = {"topk_idx": ids, "topk_weights": weights, **layout}
    quantised = x.float().to(torch.float8_e4m3fn), torch.rand(T, 1)
    recv, _, _, _, handle, _ = view.dispatch(x, **normal)
    rows, _, ll_handle, _, _ = view.low_latency_dispatch(x, ids, T, E, use_fp8=False)
    rows.nan_to_num_()
    dest = torch.empty(T, H).bfloat16()
    made = view.get_next_low_latency_combine_buffer(ll_handle)
    made.copy_(rows)
    padded = torch.rand(T, 4)
    four = torch.randint(-1, E, (T, 4))
    wide = view.dispatch(x, **(normal | {"topk_idx": four, "topk_weights": padded} | layout_of(view, four)))

    def hooked() -> Any:
        *sent, hook = view.low_latency_dispatch(x, ids, T, E, return_recv_hook=True)
        hook()
        *back, hook = view.low_latency_combine(rows, ids, weights, ll_handle, return_recv_hook=True)
        hook()
        return valid(sent[0], sent[1]), sent[1], back

    def dispatched(**options: Any) -> Any:
        received, counts, *rest, hook = view.low_latency_dispatch(x, ids, T, E, **options)
        assert hook is None
        return valid(received, counts), counts, rest[0][1:], rest[1]

    return {
        "dispatch": dispatched,
        "dispatch bf16": lambda: dispatched(use_fp8=False),
        "dispatch ue8m0": lambda: dispatched(round_scale=True, use_ue8m0=True),
        "combine": lambda: view.low_latency_combine(rows, ids, weights, ll_handle),
        "combine out=": lambda: view.low_latency_combine(rows, ids, weights, ll_handle, out=dest),
        "combine zero_copy": lambda: view.low_latency_combine(rows, ids, weights, ll_handle, zero_copy=True, out=dest),
        "hooks": hooked,
        "layout": lambda: view.get_dispatch_layout(ids, E),
        "normal": lambda: unrouted(view.dispatch(x, **normal)),
        "normal, scales": lambda: unrouted(view.dispatch(quantised, expert_alignment=4, **normal)),
        "normal, worst": lambda: unrouted(view.dispatch(x, num_worst_tokens=T, **normal))[2:],
        "cached": lambda: view.dispatch(x, handle),
        "normal combine": lambda: view.combine(recv, handle),
        "normal combine, weights": lambda: view.combine(wide[0], wide[4], topk_weights=wide[2]),
    }


def unrouted(result: Any) -> Any:
    """Without the handle's second part, which says of which dispatch it is."""
    handle = result[4]
    return *result[:4], handle[0], handle[2:], *result[5:]


def layout_of(view: deep_ep.Buffer, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    per_rank, _, per_expert, is_in_rank, _ = view.get_dispatch_layout(ids, E)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in_rank}


def valid(received: Any, counts: torch.Tensor) -> list[torch.Tensor]:
    """Rows beyond the counts are unspecified."""
    tensors = received if isinstance(received, tuple) else (received,)
    return [as_bytes(each[e, :count]) for each in tensors for e, count in enumerate(counts.tolist())]


@pytest.fixture
def view() -> Iterator[deep_ep.Buffer]:
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=T, hidden=H, topk=4, num_experts=E, mode="auto", device="cpu", timeout=60.0
    ) as made:
        yield deep_ep.Buffer.of(made)


def test_deepeps_methods_return_the_same_where_a_mode_sees_the_op(view: deep_ep.Buffer) -> None:
    for name, call in deepep_calls(view).items():
        call()
        with Watching() as mode:
            wanted = flat(call())
        assert any("nccl_ep" in each for each in mode.seen), name
        assert same(call(), wanted), name


def test_no_function_of_torch_is_called_from_python(view: deep_ep.Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.set_default_device each would pass its mode, and so would an attribute of a tensor."""
    seen: list[str] = []
    usual = DeviceContext.__torch_function__

    def note(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return usual(self, func, types, args, kwargs)

    monkeypatch.setattr(DeviceContext, "__torch_function__", note)
    x, ids, weights = inputs()
    core = view.core
    how: dict[str, Any] = {"buffer": core, "num_experts": E}
    out = nccl_ep.dispatch(x, ids, weights, **how)
    ht = nccl_ep.dispatch(x, ids, weights, mode="ht", layout="flat", **how)
    rows, dest = torch.zeros_like(out.x), torch.empty_like(x)
    calls = deepep_calls(view)
    mine: dict[str, Call] = {
        "native dispatch": lambda: nccl_ep.dispatch(x, ids, weights, **how),
        "native combine": lambda: nccl_ep.combine(rows, out.handle),
        "native combine out=": lambda: nccl_ep.combine(rows, out.handle, out=dest),
        "native ht": lambda: nccl_ep.dispatch(x, ids, weights, mode="ht", layout="flat", **how),
        "native ht combine": lambda: nccl_ep.combine(ht.x, ht.handle),
    }
    mine |= {f"deepep {name}": calls[name] for name in calls if "dispatch" not in name and name != "hooks"}
    mine["deepep dispatch"] = lambda: view.low_latency_dispatch(x, ids, T, E)
    mine["deepep dispatch, hook"] = lambda: view.low_latency_dispatch(x, ids, T, E, return_recv_hook=True)[4]()
    for call in mine.values():
        call()
    torch.set_default_device("cpu")
    try:
        torch.zeros(1)
        assert seen
        for name, call in mine.items():
            seen.clear()
            call()
            assert seen == [], name
    finally:
        torch.set_default_device(None)


def test_the_mode_of_a_default_device_is_passed_by(buffer: nccl_ep.Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.utils._device.DeviceContext does nothing but give a device to functions that make tensors. Others are seen,
    above it and below."""

    class Other(DeviceContext):
        pass

    x, ids, weights = inputs()
    seen: list[str] = []
    usual = DeviceContext.__torch_function__

    def note(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return usual(self, func, types, args, kwargs)

    monkeypatch.setattr(DeviceContext, "__torch_function__", note)

    def count() -> int:
        """Calls of the op that a mode has seen."""
        seen.clear()
        nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=E)
        return len([each for each in seen if "ll_dispatch" in each])

    torch.set_default_device("cpu")
    try:
        assert type(torch.overrides._get_current_function_mode()) is DeviceContext
        assert count() == 0
        with torch.device("cpu"):
            assert count() == 0
        for mode in (Watching(), Other("cpu")):
            with mode:
                assert count() >= 1
                with torch.device("cpu"):
                    assert count() >= 1
    finally:
        torch.set_default_device(None)
    names = {each.__name__ for each in torch.utils._device._device_constructors()}
    assert "empty" in names and not {name for name in names if "nccl_ep" in name}


def test_gradients_modes_and_subclasses_are_served(buffer: nccl_ep.Buffer) -> None:
    x, ids, weights = inputs()
    how: dict[str, Any] = {"buffer": buffer, "num_experts": E, "zero_padding": True}
    out = nccl_ep.dispatch(x, ids, weights, **how)
    home = nccl_ep.combine(out.x, out.handle)
    leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    for x_given, weights_given in ((leaf, weights), (x, leaf_weights)):
        made = nccl_ep.dispatch(x_given, ids, weights_given, **how)
        assert made.x.requires_grad and made.weights.requires_grad  # one operation
        assert nccl_ep.combine(made.x, made.handle).requires_grad
    rows = out.x.clone().requires_grad_()
    assert nccl_ep.combine(rows, out.handle).requires_grad
    with torch.no_grad():
        assert not nccl_ep.dispatch(leaf, ids, leaf_weights, **how).x.requires_grad

    class Dispatches(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for mode in (Watching(), Dispatches()):
        with mode:
            made = nccl_ep.dispatch(x, ids, weights, **how)
            back = nccl_ep.combine(made.x, made.handle)
        assert same(made, out) and same(back, home)
        assert {"nccl_ep.ll_dispatch.default", "nccl_ep.ll_combine.default"} <= set(mode.seen)
    made = nccl_ep.dispatch(x.as_subclass(Subclass), ids, weights, **how)
    assert torch.equal(made.x.as_subclass(torch.Tensor), out.x)
    extra = x[:, :8].contiguous()
    assert nccl_ep.dispatch(x, ids, weights, extra=[extra], **how).extra[0].shape == (E, T, 8)
    layout = "".join(["fl", "at"])  # not the string that a module has
    assert nccl_ep.dispatch(x, ids, weights, layout=layout, max_tokens=T + 0, **how).x.shape == (T, H)


def test_a_dispatch_waits_for_what_was_sent(buffer: nccl_ep.Buffer) -> None:
    x, ids, weights = inputs()
    how: dict[str, Any] = {"buffer": buffer, "num_experts": E}
    pending = nccl_ep.dispatch_send(x, ids, weights, **how)
    with pytest.raises(nccl_ep.UsageError, match="was sent and has not been received"):
        nccl_ep.dispatch(x, ids, weights, **how)
    del pending  # the next dispatch receives it
    before = buffer.stats()["dispatches"]
    for _ in range(2):
        nccl_ep.dispatch(x, ids, weights, **how)
    assert buffer.stats()["dispatches"] == before + 3


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_experts": 4.0}, TypeError, "num_experts is 4.0, must be an integer"),
        ({"num_experts": None}, TypeError, "num_experts is None, must be an integer"),
        ({"num_experts": 1 << 70}, ValueError, f"num_experts is {1 << 70}, must be "),
        ({"mode": "LL"}, ValueError, "mode is 'LL', must be one of ll, ht, auto"),
        (
            {"layout": ["flat"]},
            ValueError,
            r"layout is \['flat'\], must be one of expert_major, packed, rank_major, flat",
        ),
        ({"quant": "none"}, ValueError, "quant is 'none', must be one of None, fp8, fp8_rounded, fp8_ue8m0"),
        ({"capacity": "all"}, ValueError, "capacity is 'all', must be a number, None or \"exact\""),
        ({"zero_padding": "yes"}, TypeError, "zero_padding is 'yes', must be True or False"),
        ({"buffer": "b"}, TypeError, "buffer is 'b', must be a nccl_ep.Buffer"),
        ({"x": [1.0]}, TypeError, "x is a list, must be a tensor"),
        ({"topk_idx": None}, TypeError, "topk_idx is None, must be a tensor"),
        ({"scales": torch.ones(T, 1, device="meta")}, ValueError, "scales is on meta, the buffer on cpu"),
    ],
)
def test_both_calls_of_a_dispatch_refuse_alike(
    buffer: nccl_ep.Buffer, given: dict[str, Any], error: type, text: str
) -> None:
    x, ids, weights = inputs()
    how: dict[str, Any] = {"x": x, "topk_idx": ids, "topk_weights": weights, "buffer": buffer, "num_experts": E}
    for call in (nccl_ep.dispatch, nccl_ep.dispatch_send):
        with pytest.raises(error, match=text):
            call(**(how | given))
        with Watching(), pytest.raises(error, match=text):
            call(**(how | given))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"layout": "round"}, ValueError, "layout is 'round', must be one of"),
        ({"capacity": -1}, ValueError, "capacity is -1, must not be negative"),
        ({"num_experts": 2.5}, TypeError, r"num_experts is 2\.5, must be an integer"),
    ],
)
def test_a_compiled_call_refuses_with_the_same_words(
    buffer: nccl_ep.Buffer, given: dict[str, Any], error: type, text: str
) -> None:
    x, ids, weights = inputs()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return nccl_ep.dispatch(x, ids, weights, buffer=buffer, **({"num_experts": E} | given)).x

    with pytest.raises(error, match=text):
        torch.compile(layer, backend="eager")(x)


def test_numbers_of_other_kinds_are_taken(buffer: nccl_ep.Buffer) -> None:
    x, ids, weights = inputs()
    wanted = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=E, capacity=3, zero_padding=True)
    given = {"num_experts": np.int64(E), "capacity": np.int32(3), "zero_padding": np.bool_(True), "num_sms": False}
    assert same(nccl_ep.dispatch(x, ids, weights, buffer=buffer, **given), wanted)


def test_errors_of_the_op_are_the_buffers(buffer: nccl_ep.Buffer) -> None:
    x, ids, weights = inputs()
    how: dict[str, Any] = {"buffer": buffer, "num_experts": E}
    out = nccl_ep.dispatch(x, ids, weights, **how)
    for call, error in (
        (lambda: nccl_ep.dispatch(x[:, ::2], ids, weights, **how), ValueError),
        (lambda: nccl_ep.dispatch(x, ids.float(), weights, **how), ValueError),
        (lambda: nccl_ep.combine(out.x[:, :-1], out.handle), ValueError),
        (lambda: nccl_ep.combine(out.x, out.handle, num_sms=-1), ValueError),
    ):
        with pytest.raises(error) as mine:
            call()
        with Watching(), pytest.raises(error) as theirs:
            call()
        assert str(mine.value) == str(theirs.value)
    buffer.destroy()
    for gone in (lambda: nccl_ep.dispatch(x, ids, weights, **how), lambda: nccl_ep.combine(out.x, out.handle)):
        with pytest.raises(nccl_ep.UsageError, match="was destroyed"):
            gone()


@pytest.mark.parametrize("options", [{}, {"quant": "fp8"}, {"layout": "packed"}, {"mode": "ht", "layout": "flat"}])
def test_a_dispatch_makes_two_allocations(buffer: nccl_ep.Buffer, options: dict[str, Any]) -> None:
    x, ids, weights = inputs()
    for _ in range(2):
        out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=E, **options)
    tensors = [each for each in flat(out) if isinstance(each, torch.Tensor) and each.numel() > 0]
    assert len(tensors) >= 6
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == 2


def test_other_ranks_are_out_of_step() -> None:
    """One rank is under a mode, the other is not: they send the same."""

    def body(group: ThreadGroup) -> None:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=T, hidden=H, topk=K, num_experts=E, device="cpu", timeout=60.0
        ) as buffer:
            x, ids, weights = inputs(group.rank())
            results = []
            for number in range(6):
                with Watching() if number % 2 == group.rank() else torch.no_grad():
                    out = nccl_ep.dispatch(x, ids, weights, buffer=buffer, num_experts=E, zero_padding=True)
                    results.append(nccl_ep.combine(out.x, out.handle))
            assert all(torch.equal(each, results[0]) for each in results)

    run_ranks(2, body)


def test_a_hook_under_a_mode_is_seen_by_it(view: deep_ep.Buffer) -> None:
    """Which sees the op, as any other that is called."""
    x, ids, weights = inputs()
    stats = torch.zeros(E, dtype=torch.int32)
    plain = view.low_latency_dispatch(x, ids, T, E)
    *sent, hook = view.low_latency_dispatch(x, ids, T, E, stats, return_recv_hook=True)
    with Watching() as mode:
        hook()
    assert mode.seen == ["nccl_ep.ll_dispatch_deepep_recv.default"]
    for expert, count in enumerate(plain[1].tolist()):
        for mine, theirs in zip(sent[0], plain[0], strict=True):
            assert same(mine[expert, :count], theirs[expert, :count])
    assert stats.tolist() == plain[1].tolist() == sent[1].tolist()
    rows = torch.ones(E, T, H).bfloat16()
    want = view.low_latency_combine(rows, ids, weights, plain[2])[0]
    got, _, hook = view.low_latency_combine(rows, ids, weights, sent[2], return_recv_hook=True)
    with Watching() as mode:
        hook()
    assert mode.seen == ["nccl_ep.ll_combine_deepep_recv.default"] and same(got, want)


def test_a_hook_into_rows_that_want_a_gradient_is_refused(view: deep_ep.Buffer) -> None:
    """Autograd refuses it, whatever way the hook takes."""
    x, ids, _ = inputs()
    rows, *_, hook = view.low_latency_dispatch(x, ids, T, E, use_fp8=False, return_recv_hook=True)
    rows.requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        hook()
    rows.requires_grad_(False)
    hook()
    assert copy.copy(hook) is copy.deepcopy(hook) is hook


def test_a_pending_call_runs_once(view: deep_ep.Buffer) -> None:
    x, ids, weights = inputs()
    rows, _, handle, event, hook = view.low_latency_dispatch(x, ids, T, E, use_fp8=False, return_recv_hook=True)
    assert event.event is None
    with pytest.raises(nccl_ep.UsageError, match="has not been received: call its hook"):
        view.low_latency_combine(rows, ids, weights, handle)
    hook()
    with pytest.raises(nccl_ep.UsageError, match="this hook was called already"):
        hook()
    view.low_latency_combine(rows, ids, weights, handle)
