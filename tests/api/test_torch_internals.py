"""What the library takes for granted and torch does not promise: docs/architecture.md, "Private parts of torch".

Where one of these fails under a new torch, the message says what the library would do wrong there.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import nccl_ep
from nccl_ep import _C
from nccl_ep.config import pack_dispatch
from nccl_ep.marks import constant
from tests import ROOT

T, H, K, E = 4, 64, 2, 4
CONFIG = pack_dispatch({"num_experts": E, "topk": K, "max_tokens": T, "zero_padding": True})


@pytest.fixture
def buffer() -> Iterator[nccl_ep.Buffer]:
    with nccl_ep.Buffer.for_shapes(
        None,
        max_tokens=T,
        hidden=H,
        topk=K,
        num_experts=E,
        dtype=torch.float32,
        device="cpu",
        timeout=60.0,
        mode="auto",
    ) as made:
        yield made


@pytest.fixture
def scratch() -> Iterator[torch.library.Library]:
    """An op of nobody's, test_torch_internals::twice."""
    with torch.library._scoped_library("test_torch_internals", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        yield library


def arguments(made: nccl_ep.Buffer, x: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> tuple:
    x, weights = torch.ones(T, H) if x is None else x, torch.ones(T, K) if weights is None else weights
    return made._seq, x, None, torch.zeros(T, K, dtype=torch.int64), weights, T, CONFIG


class Usual:
    """Torch's way of calling the op, which counts."""

    def __init__(self) -> None:
        self.calls = 0
        self._op, *_ = torch._C._get_operation_overload("nccl_ep::ll_dispatch", "")

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        return self._op(*args, **named)


def calls_of_usual(made: nccl_ep.Buffer, within: Callable[[], AbstractContextManager[Any]], **given: Any) -> int:
    """How often a direct call inside of `within` goes torch's way."""
    usual, args = Usual(), arguments(made, **given)
    direct = _C.fast_op("ll_dispatch", usual)
    with within():
        direct(*args)
    return usual.calls


# ---- Python: nccl_ep/ops.py


def test_what_an_op_calls_can_be_replaced(scratch: torch.library.Library) -> None:
    packet = torch.ops.test_torch_internals.twice
    for op, name in ((packet, "OpOverloadPacket"), (packet.default, "OpOverload")):
        assert callable(getattr(op, "_op", None)), f"{name} has no _op: nccl_ep/ops.py cannot put its direct call there"
        usual, seen = op._op, []
        assert isinstance(usual.__module__, str), f"{name}._op has no __module__ for nccl_ep/ops.py to copy"

        def replaced(*args: Any, usual: Any = usual, seen: list[Any] = seen) -> Any:
            seen.append(args)
            return usual(*args)

        op._op = replaced
        try:
            assert torch.equal(op(torch.ones(2)), 2 * torch.ones(2))
            assert len(seen) == 1, f"{name} does not call its _op: direct calls are never made, ops are slow"
            assert len({op, packet, packet.default}) == 2, f"{name} with another _op is not itself in a set"
        finally:
            op._op = usual


def test_ops_keep_their_direct_call(buffer: nccl_ep.Buffer) -> None:
    """Torch 2.15 and newer swap `_op` of some ops of Python (`_enable_pyobj_dispatch`); ours must be left alone."""
    for name in _C.op_names():
        packet = getattr(torch.ops.nccl_ep, name)
        for op in (packet, packet.default):
            assert type(op._op) is type(_C.fast_op(name, lambda: None)), f"torch has put its own call into {name}"
            assert op._op.__name__ == name
        assert getattr(packet.default, "_pyobj_dispatcher", None) is None, f"{name} is called past its _op"


def test_torchscript_has_a_table_of_functions() -> None:
    builtins = torch.jit._builtins
    assert callable(getattr(builtins, "_register_builtin", None)), "nccl_ep/ops.py cannot tell TorchScript of its call"
    for name in _C.op_names():
        found = builtins._find_builtin(getattr(torch.ops.nccl_ep, name)._op)
        assert found == f"nccl_ep::{name}", f"TorchScript takes {name} for {found}, not for the op"


# ---- C++: csrc/torch/ops/fast_call.h


def test_a_plain_thread_is_known_for_one(buffer: nccl_ep.Buffer) -> None:
    included = str(torch._C._dispatch_tls_local_include_set())
    assert set(re.findall(r"\w+", included)) == {"DispatchKeySet", "BackendSelect", "ADInplaceOrView"}, (
        f"keys of a thread in which nothing is on: {included}; were there one beside c10::default_included_set, every "
        "call would go torch's way, and be slow"
    )
    for within in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        assert calls_of_usual(buffer, within) == 0, f"a plain call in {within.__name__} goes torch's way, and is slow"


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _functorch() -> AbstractContextManager[Any]:
    from torch._functorch.eager_transforms import grad_increment_nesting

    return grad_increment_nesting()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a TorchFunctionMode": _Functions,
    "a TorchDispatchMode": _Dispatches,
    "torch.device as a context": lambda: torch.device("cpu"),
    "functorch's grad": _functorch,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_call_under_a_mode_goes_through_torch(mode: str, buffer: nccl_ep.Buffer) -> None:
    """By thread-local keys and by the stack of modes of functions. A mode must never be passed by."""
    calls = calls_of_usual(buffer, MODES[mode])
    assert calls == 1, f"under {mode} a direct call went past torch, and past the mode"


def test_autocast_changes_no_type(buffer: nccl_ep.Buffer) -> None:
    """Whether it is seen or not: no op has a rule for it, and types stay."""
    args = arguments(buffer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = torch.ops.nccl_ep.ll_dispatch(*args), Usual()(*args)
    assert results[0][0].dtype == results[1][0].dtype == torch.float32


@pytest.mark.skipif(not hasattr(torch.overrides, "redispatch_function"), reason="this torch has no redispatch_function")
def test_one_skipped_hop_is_for_one_call(buffer: nccl_ep.Buffer) -> None:
    """`redispatch_function` of torch 2.15 has torch's parser of arguments pass by modes once, and raises where nobody
    asked the parser. A direct call must see that and go torch's way."""

    class Redispatching(_Functions):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return torch.overrides.redispatch_function(func, types, args, kwargs or {})

    seen: list[Any] = []
    args = arguments(buffer)
    for op in (torch.ops.nccl_ep.ll_dispatch, torch.ops.nccl_ep.ll_dispatch.default):
        with Redispatching():
            assert len(op(*args)) == 7
        assert len(torch.overrides.redispatch_function(op, (), args, {})) == 7
    assert len(seen) == 2 and not torch._C._peek_should_skip_torch_function()


def test_exact_tensors_are_told_from_subclasses(buffer: nccl_ep.Buffer) -> None:
    class Subclass(torch.Tensor):
        pass

    def here() -> AbstractContextManager[Any]:
        return torch.no_grad()

    x = torch.ones(T, H)
    assert calls_of_usual(buffer, here, x=torch.nn.Parameter(x)) == 0, "THPVariable_CheckExact refuses Parameters"
    assert calls_of_usual(buffer, here, x=x.as_subclass(Subclass)) == 1, "THPVariable_CheckExact takes subclasses"
    leaf, usual = x.clone().requires_grad_(), Usual()
    rows, direct = usual(*arguments(buffer, leaf))[0], _C.fast_op("ll_dispatch", usual)(*arguments(buffer, leaf))[0]
    assert usual.calls == 1, "what wants a gradient goes torch's way, and is slow"
    assert type(direct.grad_fn) is type(rows.grad_fn) is not type(None), "gradients are lost"


def test_borrowed_tensors_are_given_back(buffer: nccl_ep.Buffer) -> None:
    """c10::MaybeOwnedTraits and THPVariable_Unpack count no references, and lose none."""
    x, weights = np.ones((T, H), np.float32), np.ones((T, K), np.float32)
    alive = [weakref.ref(x), weakref.ref(weights)]
    args = arguments(buffer, torch.from_numpy(x), torch.from_numpy(weights))
    for _ in range(20):
        torch.ops.nccl_ep.ll_dispatch(*args)
    del x, weights
    gc.collect()
    assert all(each() is not None for each in alive), "a direct call has dropped an argument that the caller holds"
    assert args[1].sum() == T * H and args[4].sum() == T * K
    del args
    gc.collect()
    assert not any(each() for each in alive), "a direct call keeps its arguments for ever"


def test_the_dtypes_of_python_are_read_as_they_are(buffer: nccl_ep.Buffer) -> None:
    """THPDtype: the struct behind torch.float32."""
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        made = torch.ops.nccl_ep.arena_empty(buffer._seq, [2, 3], dtype)
        assert made.dtype == dtype and made.shape == (2, 3), f"{dtype} is taken for {made.dtype}"


def test_a_backward_pass_is_refused(buffer: nccl_ep.Buffer) -> None:
    """torch::autograd::autogradNotImplementedFallback, of torch's torch/csrc."""
    x, ids = torch.ones(T, H, requires_grad=True), torch.zeros(T, K, dtype=torch.int64)
    rows = torch.ops.nccl_ep.ll_dispatch_deepep_send(buffer._seq, x, None, ids, E, T, 0, None, None, 0)[0]
    assert rows.requires_grad, "a gradient would be left out without a word"
    with pytest.raises(RuntimeError, match="not implemented"):
        rows.sum().backward()


# ---- C++: csrc/torch/ops/device.cc, csrc/torch/deep_ep/low_latency_ops.cc


def _check_is_sound(made: torch.Tensor) -> None:
    """Made from a TensorImpl and a storage: it is what other tensors of its sizes are, to all that torch does."""
    same = torch.empty(made.shape, dtype=made.dtype)
    same.copy_(made)
    transposed = made.transpose(0, -1), same.transpose(0, -1)
    for mine, theirs in ((made, same), (made.clone(), same.clone()), (made[1:], same[1:]), transposed):
        assert torch.equal(mine, theirs) and mine.is_contiguous() == theirs.is_contiguous()
        assert mine.stride() == theirs.stride() and mine.layout == theirs.layout
    assert not made._is_view() and made._base is None and made.is_leaf and made._version == 0
    before = made._version
    made.add_(0)
    assert made._version == before + 1, "writes into it are not counted, and autograd will not notice them"
    assert torch.equal(made.view(-1), same.view(-1)) and torch.equal(made.detach(), same)


def test_tensors_that_share_an_allocation(buffer: nccl_ep.Buffer) -> None:
    """at::detail::make_tensor<TensorImpl> on a part of a storage."""
    args = arguments(buffer)
    together = _C.fast_op("ll_dispatch", Usual(), packed_results=True)(*args)
    weights, handle = together[2], together[6]
    assert weights.untyped_storage().data_ptr() == handle.untyped_storage().data_ptr()
    _check_is_sound(weights)
    _check_is_sound(handle)
    kept = handle.clone()
    del together, weights
    gc.collect()
    assert torch.equal(handle, kept), "the allocation went with one of its tensors"


def test_a_tensor_on_the_front_of_its_allocation() -> None:
    """set_sizes_contiguous on a larger allocation: DeepEP's src_info, behind which the handle lies."""
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=T, hidden=640, topk=K, num_experts=E, device="cpu", timeout=60.0
    ) as made:
        x, ids = torch.ones(T, 640).bfloat16(), torch.zeros(T, K, dtype=torch.int64)
        head = (made._seq,)
        results = torch.ops.nccl_ep.ll_dispatch_deepep(*head, x, None, ids, E, T, 0, None, None, 0)
    counts, src_info = results[3], results[4]
    for each in (counts, src_info):
        assert each.untyped_storage().nbytes() > each.nbytes, "what lies behind it was cut off"
        _check_is_sound(each)


# ---- Python: nccl_ep/gradients.py, nccl_ep/bootstrap.py


def test_a_tensor_knows_that_it_is_a_view() -> None:
    x = torch.ones(2, 3)
    assert not x._is_view() and x[0]._is_view(), "refuse_backward would detach a view, which torch does not allow"


def test_a_process_group_has_a_store(tmp_path: Path) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        pytest.skip("another test has left torch's world")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        store = PrefixStore("nccl_ep", group.get_group_store())
        store.set("key", b"bytes\0of any kind")
        assert store.get("key") == b"bytes\0of any kind" and store.check(["key"]) and not store.check(["other"])
        assert isinstance(group.group_name, str)
        weakref.ref(group)
    finally:
        dist.destroy_process_group()


# ---- The table


def test_the_table_names_these_tests() -> None:
    """Every test that docs/architecture.md names in its table is there, and the other way round for those here."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.split("## Private parts of torch", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"\b(test_\w+)\b(?!\.py|/)", re.sub(r"`tests/[^`]*`", "", table)))
    here = {name for name in globals() if name.startswith("test_")} - {"test_the_table_names_these_tests"}
    files = "\n".join(path.read_text() for path in (ROOT / "tests").glob("**/test_*.py"))
    assert named and not [name for name in named if f"def {name}(" not in files]
    assert here <= named


# ---- Python: nccl_ep/handle.py


def test_handles_and_outputs_are_nodes_of_pytrees(buffer: nccl_ep.Buffer) -> None:
    """torch.utils._pytree.register_pytree_node."""
    for mode in ("ll", "ht"):
        out = nccl_ep.dispatch(
            torch.ones(T, H), torch.zeros(T, K, dtype=torch.int64), buffer=buffer, num_experts=E, mode=mode,
            layout="packed", zero_padding=True,
        )  # fmt: skip
        leaves, spec = torch.utils._pytree.tree_flatten(out)
        assert all(each is None or isinstance(each, torch.Tensor) for each in leaves)
        again = torch.utils._pytree.tree_unflatten(leaves, spec)
        assert again.x is out.x and again.handle.tensor is out.handle.tensor and again.handle.mode == mode
        assert torch.equal(again.counts, out.counts) and again.handle.layout is out.handle.layout
        assert torch.equal(nccl_ep.combine(again.x, again.handle), nccl_ep.combine(out.x, out.handle))
        doubled = torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.clone(), again)
        assert torch.equal(doubled.x, out.x) and doubled.handle.alignment == out.handle.alignment


def test_a_constant_function_is_marked_as_torch_marks_it() -> None:
    def ours() -> None: ...
    def theirs() -> None: ...

    assert vars(constant(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_threads_may_make_the_first_fake_tensors() -> None:
    """In a process of its own: it is the first that counts. Four threads without nccl_ep.testing crash most times."""
    code = """
from torch._subclasses.fake_tensor import FakeTensorMode
from nccl_ep.testing import run_ranks
def body(group):
    for _ in range(2000):
        with FakeTensorMode():
            pass
run_ranks(4, body)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
