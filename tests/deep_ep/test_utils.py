"""The modules beside DeepEP's buffers: numbers, seeds, times and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep.deep_ep import get_logical_domain_size, get_physical_domain_size
from nccl_ep.deep_ep.utils import envs, testing
from nccl_ep.deep_ep.utils import math as m
from nccl_ep.testing import run_ranks


def test_integers() -> None:
    assert [m.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2] and [m.align(x, 4) for x in (0, 3, 8)] == [0, 4, 8]
    assert m.safe_div(3, 2) == 1.5 and m.safe_div(0, 0) == 0
    with pytest.raises(ZeroDivisionError):
        m.safe_div(1, 0)


@pytest.mark.parametrize("hidden", [128, 256, 200])
@pytest.mark.parametrize("tokens", [0, 3])
def test_rows_that_were_cast_come_back(tokens: int, hidden: int) -> None:
    x = torch.randn(tokens, hidden).bfloat16()
    cast, scales = m.per_token_cast_to_fp8(x)
    assert cast.dtype == torch.float8_e4m3fn and cast.shape == x.shape and scales.shape == (tokens, -(-hidden // 128))
    for block, scale in enumerate(scales.unbind(1)):
        assert torch.equal(scale, x[:, block * 128 : block * 128 + 128].abs().float().amax(1) / 448)
    back = m.per_token_cast_back(cast, scales)
    assert back.dtype == torch.bfloat16 and back.shape == x.shape
    torch.testing.assert_close(back, x, rtol=0.07, atol=0.01)


def test_scales_may_be_exponents() -> None:
    x = torch.randint(-4, 5, (2, 512)).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128, 126, 130]] * 2, dtype=torch.uint8)
    back = m.per_token_cast_back(x, exponents.view(torch.int32))
    factors = torch.tensor([1.0, 2.0, 0.5, 8.0]).repeat_interleave(128)
    assert torch.equal(back.float(), x.float() * factors)


def test_differences() -> None:
    x = torch.randn(5, 7)
    assert m.calc_diff(x, x) == pytest.approx(0, abs=1e-12) and 0 < m.calc_diff(x, x + 0.01) < 1e-3
    assert m.calc_diff(torch.full((1,), 0.0), torch.full((1,), -1.0)) == 1


def test_unique_ids_of_rows() -> None:
    x = torch.tensor([[3, 1, 3, -1], [0, 0, 0, 0], [2, 5, 1, 4], [-1, -1, -1, -1]])
    m.inplace_unique(x, 6)
    assert x.tolist() == [[3, 1, -1, -1], [0, -1, -1, -1], [5, 4, 2, 1], [-1, -1, -1, -1]]
    few = torch.tensor([[1, 0, 1]])
    m.inplace_unique(few, 2)
    assert few.tolist() == [[1, 0, -1]]


def test_scores_of_groups() -> None:
    scores = torch.arange(1.0, 9.0).view(1, 8)
    assert m.create_grouped_scores(scores, torch.tensor([[0, 3]]), 4).tolist() == [[1, 2, 0, 0, 0, 0, 7, 8]]


def test_hashes_and_bytes() -> None:
    x, y = torch.arange(4, dtype=torch.int32), torch.ones(2, dtype=torch.float64)
    assert m.hash_tensor(x) == 6 and m.hash_tensors(x, None, (y, [x])) == m.hash_tensor(y)
    assert m.count_bytes(x, None, (y, [x])) == 16 + 16 + 16


def test_domains_of_a_group_are_those_of_a_buffer() -> None:
    def body(group: Any) -> None:
        with nccl_ep.deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=1, hidden=8, device="cpu") as buffer:
            assert get_physical_domain_size(group) == buffer.get_physical_domain_size() == (1, 3)
            assert get_logical_domain_size(group, False) == buffer.get_logical_domain_size()

    run_ranks(3, body)
    with pytest.raises(TypeError, match="allow_hybrid_mode is 'no', must be True or False"):
        get_logical_domain_size(None, "no")  # type: ignore[arg-type]


def test_ranks_start_as_in_deepeps_tests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("WORLD_SIZE", "1"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        rank, ranks, group = envs.init_dist(0, 1, seed=5)
        assert (rank, ranks, group.size()) == (0, 1, 1) and torch.get_default_dtype() == torch.bfloat16
        drawn = torch.rand(4)
        torch.manual_seed(5)
        assert torch.equal(drawn, torch.rand(4)) and envs.get_local_seed() == envs.get_global_seed() == 5
        envs.dist_print("met", once_in_node=True)
        assert capsys.readouterr().out == "met\n"
        envs.check_torch_deterministic()
    finally:
        torch.set_default_dtype(torch.float32)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_times_of_a_call() -> None:
    calls: list[str] = []
    mean, least, most = testing.bench(lambda: calls.append("f"), 2, 5, lambda: calls.append("p"), flush_l2=False)
    assert 0 <= least <= mean <= most and calls == ["f"] * 2 + ["f", "p"] * 5
    with pytest.raises(ValueError, match="num_tests is 1, must be at least 2"):
        testing.bench(lambda: None, num_tests=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_times_of_kernels_need_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="there is no GPU"):
        testing.bench_kineto(lambda: None, "dispatch")


def _of_an_operation() -> nccl_ep.EventOverlap:
    with nccl_ep.deep_ep.Buffer(None, num_nvl_bytes=1 << 20, device="cpu") as buffer:
        return buffer.get_dispatch_layout(torch.zeros(2, 1, dtype=torch.int64), 1, async_finish=True)[-1]


@pytest.mark.parametrize("make", [lambda: nccl_ep.EventOverlap(nccl_ep.EventHandle()), _of_an_operation])
def test_an_event_gives_up_what_it_holds(make: Callable[[], nccl_ep.EventOverlap]) -> None:
    event, called = make(), []
    event.register_hook_after_wait(lambda: called.append(1))
    with pytest.raises(AssertionError, match="there is a hook already"):
        event.register_hook_after_wait(print)
    event.current_stream_wait()
    event.current_stream_wait()
    assert called == [1] and event.event is not None
    with event as same:
        assert same is event
    assert event.event is not None
    with event(release_handle=True):
        pass
    assert event.event is None and event.extra_tensors is None
    held = make()
    held.current_stream_wait(release_handle=True)
    assert held.event is None
    with pytest.raises(AssertionError, match="there is no event"):
        held.current_stream_wait()
