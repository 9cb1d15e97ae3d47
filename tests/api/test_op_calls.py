"""Ops called without torch's parser of arguments: the same results and errors, and the op itself where it matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import nccl_ep
from nccl_ep import _C
from nccl_ep.handle import Quant
from tests.support.op_checks import unnumbered

T, H, K, E = 4, 64, 2, 4
USUAL = ("carried", "carrier", "row_carrier", "size_at")  # not on the hot path: torch's way
NOBODYS = torch.empty(1 << 40, 1, 1, 0, dtype=torch.int64)  # of a buffer that there is not
packet = torch.ops.nccl_ep.ll_dispatch
_overload = torch._C._get_operation_overload


def op(*args: Any, **named: Any) -> Any:
    """By torch's parser, as torch.ops calls the ops of others."""
    usual, _, _ = _overload("nccl_ep::ll_dispatch", "")
    return usual(*args, **named)


def same(given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """But for the number of the dispatch, which the handle has behind the tokens of its one rank."""
    *results, handle = given
    *others, other = wanted
    is_same = all(torch.equal(mine, theirs) for mine, theirs in zip(results, others, strict=True))
    return is_same and torch.equal(unnumbered(handle, 1), unnumbered(other, 1))


class Seen:
    """In the place of the op: notes that it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        return op(*args, **named)


@pytest.fixture
def buffer() -> Iterator[nccl_ep.Buffer]:
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=T, hidden=H, topk=K, num_experts=E, dtype=torch.float32, device="cpu", timeout=60.0
    ) as made:
        yield made


def named_arguments(made: nccl_ep.Buffer, /, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    named = {
        "seq": made._seq, "x": torch.randn(T, H, generator=generator), "x_scales": None,
        "topk_idx": torch.randint(0, E, (T, K), generator=generator), "topk_weights": torch.ones(T, K),
        "capacity": T,
    }  # fmt: skip
    fields = {
        "num_experts": E, "topk": K, "max_tokens": T, "layout": 0, "alignment": 1, "quant": 0, "zero_padding": 1,
        "reports_ids": 1, "all_weights": 0, "num_sms": 0,
    }  # fmt: skip
    fields |= {name: changes.pop(name) for name in list(changes) if name in fields}
    return named | {"config": tuple(fields.values())} | changes


def arguments(made: nccl_ep.Buffer, /, **changes: Any) -> tuple[Any, ...]:
    return tuple(named_arguments(made, **changes).values())


def test_torch_ops_are_called_directly() -> None:
    """Were an attribute of torch's to change its name, ops would work as before, and slower."""
    names = [schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas() if "nccl_ep::" in schema.name]
    assert sorted([*_C.op_names(), *USUAL]) == sorted(names)
    assert len(names) > 20
    for name in _C.op_names():
        each = getattr(torch.ops.nccl_ep, name)
        assert type(each._op) is type(each.default._op) is type(_C.fast_op(name, op))
        assert each._op.__name__ == each.default._op.__name__ == name


def test_named_arguments_go_to_the_op(buffer: nccl_ep.Buffer) -> None:
    named = named_arguments(buffer)
    name, *others = named
    wanted = op(**named)
    seen = Seen()
    direct = _C.fast_op("ll_dispatch", seen)
    for call in (direct, packet, packet.default):
        for given in (call(**named), call(named[name], **{each: named[each] for each in others})):
            assert same(given, wanted)
    assert seen.calls == 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_finds_the_op(buffer: nccl_ep.Buffer) -> None:
    @torch.jit.script
    def require(seq: torch.Tensor, info: torch.Tensor, capacity: int, config: list[int]) -> torch.Tensor:
        torch.ops.nccl_ep.require_no_overflow(seq, info, capacity, config)
        return seq

    assert "nccl_ep::require_no_overflow" in str(require.graph)
    named = named_arguments(buffer)
    info = op(**named)[5]
    assert require(buffer._seq, info, named["capacity"], list(named["config"])) is buffer._seq


def test_plain_calls_do_what_the_op_does(buffer: nccl_ep.Buffer) -> None:
    seen = Seen()
    direct = _C.fast_op("ll_dispatch", seen)
    for scales in (None, torch.ones(T, 4, dtype=torch.int32)):
        args = arguments(buffer, x_scales=scales)
        given, wanted = direct(*args), op(*args)
        assert same(given, wanted)
        for mine, theirs in zip(given, wanted, strict=True):
            assert (mine.dtype, mine.stride(), mine.requires_grad) == (theirs.dtype, theirs.stride(), False)
    assert seen.calls == 0
    with torch.inference_mode():
        assert direct(*arguments(buffer))[0].is_inference()
    assert seen.calls == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"quant": 7},
        {"capacity": -1},
        {"x": torch.zeros(T)},
        {"num_sms": 1 << 40},
        {"seq": NOBODYS},
        {"seq": torch.zeros(1)},
    ],
)
def test_errors_are_those_of_the_op(buffer: nccl_ep.Buffer, changes: dict[str, Any]) -> None:
    seen = Seen()
    args = arguments(buffer, **changes)
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        op(*args)
    with pytest.raises(type(theirs.value)) as mine:
        _C.fast_op("ll_dispatch", seen)(*args)
    assert str(mine.value).split("\n")[0] == str(theirs.value).split("\n")[0]
    assert type(mine.value) is type(theirs.value)
    assert seen.calls == 0


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.ones(T, H).as_subclass(Subclass)},
        {"quant": Quant.NONE},
        {"zero_padding": True},
    ],
)  # fmt: skip
def test_what_is_not_plain_goes_to_the_op(buffer: nccl_ep.Buffer, changes: dict[str, Any]) -> None:
    seen = Seen()
    args = arguments(buffer, **changes)
    assert torch.equal(_C.fast_op("ll_dispatch", seen)(*args)[0], op(*args)[0])
    assert seen.calls == 1


@pytest.mark.parametrize("change", [{"num_experts": 1 << 80}, {"x": None}, {"x": [1]}, {"topk_weights": 3}, None])
def test_arguments_that_do_not_fit_are_refused_by_the_op(buffer: nccl_ep.Buffer, change: dict[str, Any] | None) -> None:
    seen = Seen()
    args = arguments(buffer)[:-1] if change is None else arguments(buffer, **change)
    with pytest.raises((RuntimeError, TypeError, ValueError, OverflowError)):
        _C.fast_op("ll_dispatch", seen)(*args)
    assert seen.calls == 1


@pytest.mark.parametrize("name", ["x", "topk_weights"])
def test_what_wants_a_gradient_is_plain(buffer: nccl_ep.Buffer, name: str) -> None:
    """The same results and the same gradients, without torch's parser; none in no_grad."""
    seen = Seen()
    direct = _C.fast_op("ll_dispatch", seen)
    leaf = named_arguments(buffer)[name].requires_grad_()
    args = arguments(buffer, **{name: leaf})
    gradients = []
    for made in (direct(*args), op(*args)):
        assert [each.requires_grad for each in made] == [each.is_floating_point() and each.numel() > 0 for each in made]
        result = made[0 if name == "x" else 2]
        weighted = (result * torch.arange(float(result.numel())).view_as(result)).sum()
        gradients.append(torch.autograd.grad(weighted, leaf)[0])
    assert torch.equal(*gradients) and gradients[0].ne(0).any()
    assert same(direct(*args), op(*args))
    with torch.no_grad():
        assert not any(each.requires_grad for each in direct(*args))
    assert seen.calls == 0


def test_gradients_are_left_to_the_op(buffer: nccl_ep.Buffer) -> None:
    x, idx, weights = torch.ones(T, H, requires_grad=True), torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K)
    out = nccl_ep.dispatch(x, idx, weights, buffer=buffer, num_experts=E)
    assert type(out.x.grad_fn) is type(op(*arguments(buffer, x=x))[0].grad_fn)
    assert out.x.grad_fn is not None
    y = nccl_ep.combine(out.x, out.handle)
    assert y.grad_fn is not None
    with torch.no_grad():
        out = nccl_ep.dispatch(x, idx, weights, buffer=buffer, num_experts=E)
    assert out.x.grad_fn is None


def test_modes_of_torch_see_the_op(buffer: nccl_ep.Buffer) -> None:
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"function {func}")
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"dispatch {func}")
            return func(*args, **(kwargs or {}))

    x, idx = torch.ones(T, H), torch.zeros(T, K, dtype=torch.int64)
    with Functions():
        nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=E)
    with Dispatches():
        out = nccl_ep.dispatch(x, idx, buffer=buffer, num_experts=E)
        nccl_ep.combine(out.x, out.handle)
    assert "function nccl_ep.ll_dispatch.default" in seen
    assert "dispatch nccl_ep.ll_dispatch.default" in seen
    assert "dispatch nccl_ep.ll_combine.default" in seen


def test_names_are_those_of_ops() -> None:
    with pytest.raises(ValueError, match="there is no op nothing"):
        _C.fast_op("nothing", op)


@pytest.mark.parametrize("layout", [0, 1, 3])
def test_small_results_share_one_allocation(buffer: nccl_ep.Buffer, layout: int) -> None:
    """One allocation beside rows, None for what the layout has not got; torch's way is the schema's."""
    seen = Seen()
    together = _C.fast_op("ll_dispatch", seen, packed_results=True)
    args = arguments(buffer, layout=layout, x_scales=torch.ones(T, 4, dtype=torch.int32))
    wanted, results = op(*args), together(*args)
    assert [each is None for each in results] == [False, False, False, layout < 2, layout != 1, False, False]
    assert same(
        [torch.empty_like(theirs) if mine is None else mine for mine, theirs in zip(results, wanted, strict=True)],
        wanted,
    )
    for mine, theirs in zip(results, wanted, strict=True):
        assert theirs.numel() == 0 if mine is None else mine.stride() == theirs.stride()
    storages = [each.untyped_storage().data_ptr() for each in results if each is not None]
    assert len(set(storages)) == 2 and storages.count(storages[-1]) == len(storages) - 1
    small = sorted(results[1:], key=lambda each: 0 if each is None else each.data_ptr())
    taken = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in small if each is not None]
    assert all(end <= begin and begin % 16 == 0 for (_, end), (begin, _) in pairwise(taken))
    kept = results[2].clone()
    for each in (results[5], results[6]):
        each.fill_(-7)
    assert torch.equal(results[2], kept)
    assert seen.calls == 0
    with FlopCounterMode(display=False):
        assert all(isinstance(each, torch.Tensor) for each in together(*args))
    assert seen.calls == 1


def test_tensors_on_one_device_are_told_from_others() -> None:
    x = torch.ones(2)
    assert _C.on_same_device(x)
    assert _C.on_same_device(x, None, torch.ones(1), torch.nn.Parameter(x))
    for other in (1, [x], x.as_subclass(Subclass), torch.ones(2, device="meta"), x.to_sparse()):
        assert not _C.on_same_device(x, x, other)
    with pytest.raises(TypeError):
        _C.on_same_device(None, x)
