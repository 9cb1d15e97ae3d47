"""``nccl_ep.deep_ep.Buffer`` has a core buffer, which has none of DeepEP's names."""

from __future__ import annotations

import copy
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.testing import ThreadGroup, run_ranks

ROOT = next(folder for folder in Path(__file__).parents if (folder / "nccl_ep").is_dir())
HALF = torch.bfloat16
IDS = torch.tensor([[0, 1], [1, -1], [0, 1]])
X, WEIGHTS = torch.arange(3 * 64).view(3, 64).to(HALF), torch.full((3, 2), 0.5)
BYTES = 1 << 20
ATTRIBUTES = {"num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "explicitly_destroy", "group_size"}


@pytest.fixture
def core() -> Iterator[nccl_ep.Buffer]:
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=4, hidden=64, topk=2, num_experts=2, mode="auto", device="cpu", enable_shrink=True
    ) as made:
        yield made


def python(code: str) -> str:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- Imports


def test_the_core_is_imported_and_used_without_deep_ep() -> None:
    code = """
import sys, torch, nccl_ep
assert "Config" in nccl_ep.__all__ and not hasattr(nccl_ep, "no_such_name")
x, ids = torch.ones(2, 64), torch.zeros(2, 1, dtype=torch.int64)
sizes = dict(max_tokens=2, hidden=64, topk=1, num_experts=1, dtype=x.dtype, device="cpu", mode="auto")
with nccl_ep.Buffer.for_shapes(None, **sizes) as buffer, nccl_ep.Buffer(None, device="cpu"):
    out = nccl_ep.dispatch(x, ids, buffer=buffer, num_experts=1)
    nccl_ep.combine_send(out.x, out.handle, async_finish=True).receive()
    buffer.stats(), buffer.get_comm_stream()
print([name for name in sys.modules if "deep_ep" in name])
print(nccl_ep.Config().num_sms, nccl_ep.topk_idx_t, nccl_ep.deep_ep.Buffer.num_sms)
"""
    assert python(code).splitlines() == ["[]", "20 torch.int64 20"]


def test_deepeps_names_are_there_and_no_more() -> None:
    from nccl_ep.deep_ep.utils import EventHandle, EventOverlap

    first = {"Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"}
    second = {"ElasticBuffer", "EPBuffer", "EPHandle", "HybridEPBuffer"}
    functions = {"get_logical_domain_size", "get_physical_domain_size"}
    assert set(deep_ep.__all__) == first | second | functions
    assert (EventHandle, EventOverlap) == (deep_ep.EventHandle, deep_ep.EventOverlap)
    for name in ("Config", "EventHandle", "EventOverlap", "topk_idx_t"):
        assert getattr(nccl_ep, name) is getattr(deep_ep, name)
    with pytest.raises(AttributeError, match="module 'nccl_ep' has no attribute 'ElasticBuffer'"):
        nccl_ep.ElasticBuffer  # noqa: B018  # type: ignore[attr-defined]


def test_documents_tell_all_of_deepeps_names() -> None:
    written = set(re.findall(r"\w+", (ROOT / "docs/deepep.md").read_text() + (ROOT / "README.md").read_text()))
    assert not {name for name in dir(deep_ep.Buffer) if not name.startswith("_")} - written


# ---- Composition


def test_a_buffer_has_a_core() -> None:
    with deep_ep.Buffer(None, 256, 1 << 22, True, device="cpu", name="whole") as buffer:
        assert type(buffer.core) is nccl_ep.Buffer and not isinstance(buffer, nccl_ep.Buffer)
        assert (buffer.name, buffer.runtime, buffer.group) == ("whole", buffer.core.runtime, buffer.core.group)
        assert buffer.get_comm_stream() is buffer.core.get_comm_stream()
        assert deep_ep.Buffer.of(buffer.core) is buffer and deep_ep.Buffer.of(buffer) is buffer
        assert buffer.stats()["mode"] == buffer.core.stats()["mode"] == "auto"
        assert "nccl_ep.deep_ep.Buffer whole: rank 0 of 1" in repr(buffer)
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"deep_ep\.Buffer cannot be pickled or copied"):
                duplicate(buffer)
    with pytest.raises(nccl_ep.UsageError, match="destroyed"):
        buffer.core.require_usable()


def test_a_core_of_shapes_gets_deepeps_methods(core: nccl_ep.Buffer) -> None:
    view = deep_ep.Buffer.of(core)
    assert view.core is core and deep_ep.Buffer.of(core) is view
    assert (view.num_nvl_bytes, view.num_rdma_bytes, view.low_latency_mode, view.enable_shrink) == (0, 0, False, True)
    rows, counts, handle, _, _ = view.low_latency_dispatch(X, IDS, 4, 2, use_fp8=False)
    out = nccl_ep.dispatch(X, IDS, buffer=core, num_experts=2)
    for expert, count in enumerate(counts.tolist()):
        assert torch.equal(rows[expert, :count], out.x[expert, :count])
    assert torch.equal(
        view.low_latency_combine(rows, IDS, WEIGHTS, handle)[0], nccl_ep.combine(out.x, out.handle, weights=WEIGHTS)
    )
    assert core.stats()["dispatches"] == 2  # of both faces: no other window


def test_a_view_makes_nothing(core: nccl_ep.Buffer) -> None:
    """It is cheap, and what it keeps outlives it."""
    before = core.stats()
    scratch = deep_ep.Buffer.of(core).get_next_low_latency_combine_buffer((None, None, 4, 64, 2))  # type: ignore[arg-type]
    assert deep_ep.Buffer.of(core).get_next_low_latency_combine_buffer((None, None, 4, 64, 2)) is scratch  # type: ignore[arg-type]
    after = core.stats()
    assert (before["scratch_bytes"], after["scratch_bytes"]) == (0, scratch.nbytes)
    assert before | {"scratch_bytes": scratch.nbytes} == after
    core.destroy()
    assert core.stats()["scratch_bytes"] == 0


def test_a_hook_that_was_not_called_is_known_to_the_next_view(core: nccl_ep.Buffer) -> None:
    rows, _, handle, _, hook = deep_ep.Buffer.of(core).low_latency_dispatch(
        X, IDS, 4, 2, use_fp8=False, return_recv_hook=True
    )
    assert isinstance(rows, torch.Tensor) and hook is not None
    with pytest.raises(nccl_ep.UsageError, match="was sent and has not been received: call its hook"):
        deep_ep.Buffer.of(core).low_latency_combine(rows, IDS, WEIGHTS, handle)
    hook()
    deep_ep.Buffer.of(core).low_latency_combine(rows, IDS, WEIGHTS, handle)


def test_a_buffer_ends_with_its_last_reference() -> None:
    """No cycle keeps the window until the garbage is collected."""
    gc.disable()
    try:
        for keep in ("buffer", "core"):
            buffer: Any = deep_ep.Buffer(None, BYTES, device="cpu")
            core = weakref.ref(buffer.core)
            buffer.get_dispatch_layout(IDS, 2)
            if keep == "core":
                buffer = buffer.core
                deep_ep.Buffer.of(buffer)
                assert buffer._companion.num_nvl_bytes == BYTES and buffer._companion.view() is None
            assert core() is not None
            del buffer
            assert core() is None
    finally:
        gc.enable()


def test_what_is_no_core_buffer_is_refused(core: nccl_ep.Buffer) -> None:
    with pytest.raises(TypeError, match=r"core is a int, must be a nccl_ep\.Buffer"):
        deep_ep.Buffer.of(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"buffer is <nccl_ep\.deep_ep\.Buffer .*>, must be .*: give its core"):
        nccl_ep.dispatch(X, IDS, buffer=deep_ep.Buffer.of(core), num_experts=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_nvl_bytes": "1"}, TypeError, "num_nvl_bytes is '1', must be an integer"),
        ({"num_nvl_bytes": -1}, ValueError, "num_nvl_bytes is -1, must be 0 to"),
        ({"num_rdma_bytes": 1 << 64}, ValueError, "num_rdma_bytes is 18446744073709551616, must be 0 to"),
        ({"low_latency_mode": "no"}, TypeError, "low_latency_mode is 'no', must be True or False"),
        ({"allow_mnnvl": ()}, TypeError, "allow_mnnvl is a tuple, must be True or False"),
        ({"explicitly_destroy": torch.ones(2)}, TypeError, "explicitly_destroy is a Tensor, must be True or False"),
        ({"enable_shrink": 2}, TypeError, "enable_shrink is 2, must be True or False"),
        ({"num_nvl_bytes": BYTES, "domain_size": 1.5}, TypeError, "domain_size is 1.5, must be an integer"),
        ({"num_nvl_bytes": BYTES, "domain_size": 3}, ValueError, "1 ranks do not divide into domains of 3"),
        ({"group": 3}, TypeError, "group is a int: must be a torch process group"),
        ({"comm": 3}, TypeError, "comm is a int, must be an mpi4py communicator"),
        ({"sizes": (1, 2)}, TypeError, "unexpected keyword argument 'sizes'"),
        ({"timeout": "x"}, TypeError, "timeout is 'x', must be a number of seconds"),
        ({"use_nvfp4": True}, TypeError, "unexpected keyword argument 'use_nvfp4'"),
    ],
)
def test_bad_arguments_are_refused_with_the_values(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        deep_ep.Buffer(**{"device": "cpu", **arguments})


def test_a_core_buffer_has_none_of_deepeps_names() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_nvl_bytes'"):
        nccl_ep.Buffer(None, num_nvl_bytes=BYTES)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        nccl_ep.Buffer(None, BYTES)  # type: ignore[misc]
    with nccl_ep.Buffer(None, device="cpu") as core, deep_ep.Buffer(None, device="cpu") as buffer:
        shared = {"check", "require_usable", "set_timeout", "stats", "destroy", "get_comm_stream", "enable_shrink",
                  "device", "domain_size", "group", "name", "num_ranks", "on_overflow", "rank", "runtime"}  # fmt: skip
        assert {name for name in dir(core) if not name.startswith("_") and hasattr(buffer, name)} == shared


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [({}, "ll"), ({"num_nvl_bytes": BYTES}, "auto"), ({"num_nvl_bytes": 256, "num_rdma_bytes": BYTES}, "auto"),
     ({"num_nvl_bytes": BYTES, "num_rdma_bytes": 1 << 22, "low_latency_mode": True}, "auto"),
     ({"num_rdma_bytes": 1 << 22, "low_latency_mode": True}, "ll"), ({"low_latency_mode": True}, "ll")],
    ids=str,
)  # fmt: skip
def test_a_window_has_the_bytes_that_were_asked_for(arguments: dict[str, Any], mode: str) -> None:
    def body(group: ThreadGroup) -> None:
        with deep_ep.Buffer(group, device="cpu", **arguments) as buffer:
            assert buffer.stats()["mode"] == mode
            asked = sum(arguments.get(name, 0) for name in ("num_nvl_bytes", "num_rdma_bytes"))
            assert buffer.stats()["window_bytes"] >= 0.99 * asked  # low latency never exceeds its bytes
            for name in ATTRIBUTES:
                assert getattr(buffer, name) == arguments.get(name, 2 * (name == "group_size"))

    run_ranks(2, body)


# ---- Statics


def test_there_is_one_number_of_sms() -> None:
    class Mine(deep_ep.Buffer):
        pass

    try:
        with deep_ep.Buffer(None, BYTES, device="cpu") as buffer:
            kinds: tuple[Any, ...] = (deep_ep.Buffer, Mine, buffer)
            for number, setter in enumerate(kinds, start=11):
                setter.set_num_sms(2 * number)
                for kind in kinds:
                    assert kind.num_sms == 2 * number
                    assert kind.get_dispatch_config(8) == nccl_ep.Config(2 * number, 6, 256, 6, 128)
                    assert kind.get_combine_config(8).num_sms == 2 * number
                with pytest.raises(ValueError, match="num_sms is 3, must be even"):
                    setter.set_num_sms(3)
    finally:
        deep_ep.Buffer.set_num_sms(20)


def test_a_subclass_overrides_methods_and_of_makes_one() -> None:
    class Mine(deep_ep.Buffer):
        calls = 0

        def get_dispatch_layout(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().get_dispatch_layout(*args, **kwargs)

    with Mine(None, BYTES, device="cpu") as buffer:
        assert buffer.get_dispatch_layout(IDS, 2)[0].tolist() == [3] and buffer.calls == 1
    with nccl_ep.Buffer(None, device="cpu") as core:
        view = deep_ep.Buffer.of(core)
        mine = Mine.of(core)
        assert type(mine) is Mine and mine.core is view.core and Mine.of(core) is deep_ep.Buffer.of(core) is mine
