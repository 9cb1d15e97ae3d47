"""What DeepEP's normal mode refuses, and its sizes and tuning."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.deep_ep.v1.config import bytes_for_tokens, sizes_for_bytes, tokens_that_fit
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.normal_ranks import normal_arguments, normal_buffer, small_case

HALF = torch.bfloat16


# ---- Handles of other dispatches


@pytest.mark.parametrize("domain_size", [2, 1])
@pytest.mark.parametrize("step", ["combine", "weights", "cached"])
def test_handles_of_different_dispatches_are_refused_on_all_ranks(step: str, domain_size: int) -> None:
    def body(group: ThreadGroup) -> None:
        rank, buffer = group.rank(), normal_buffer(group, domain_size=domain_size)
        ids = torch.tensor([[0, 1], [1, -1], [-1, -1]])
        per_rank, per_domain, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 2)
        x = torch.ones(3, 64, dtype=HALF)
        sent = [
            buffer.dispatch(
                x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_domain, is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=torch.full((3, 2), 0.5),
            )
            for _ in range(2)
        ]  # fmt: skip
        for rows, _, _, _, handle, _ in sent:
            assert buffer.combine(rows, handle)[0][:, 0].tolist() == [2, 1, 0]
        rows, _, weights, _, handle, _ = sent[rank]
        mine, theirs = (f"rank {each} that of dispatch {1 + 2 * each}" for each in (rank, 1 - rank))
        with pytest.raises(nccl_ep.MismatchError, match=f"gave handles of different .*: {mine}, {theirs}"):
            if step == "cached":
                buffer.dispatch(x, handle=handle)
            else:
                buffer.combine(rows, handle, topk_weights=weights if step == "weights" else None)
            buffer.runtime.check()
        buffer.destroy()

    run_ranks(2, body)


# ---- Sizes, tuning


def test_signatures_are_deepeps() -> None:
    def names(method: Any) -> list[str]:
        return [name for name in inspect.signature(method).parameters if name != "self"]

    stream = ["previous_event", "async_finish", "allocate_on_comm_stream"]
    assert names(deep_ep.Buffer.get_dispatch_layout) == ["topk_idx", "num_experts", *stream]
    assert names(deep_ep.Buffer.dispatch) == [
        "x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert",
        "topk_idx", "topk_weights", "expert_alignment", "num_worst_tokens", "config", *stream,
    ]  # fmt: skip
    assert names(deep_ep.Buffer.combine) == ["x", "handle", "topk_weights", "bias", "config", *stream]
    assert names(nccl_ep.Config) == [
        "num_sms", "num_max_nvl_chunked_send_tokens", "num_max_nvl_chunked_recv_tokens",
        "num_max_rdma_chunked_send_tokens", "num_max_rdma_chunked_recv_tokens",
    ]  # fmt: skip
    assert deep_ep.Buffer.is_sm90_compiled() in (True, False) and nccl_ep.topk_idx_t == torch.int64


def test_the_tables_of_configs_are_deepeps() -> None:
    nvl = [(config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens)
           for config in map(deep_ep.Buffer.get_dispatch_config, (2, 4, 8, 16, 64, 96, 128, 144, 160))]  # fmt: skip
    assert nvl == [
        (24, 256), (6, 256), (6, 256), (36, 288), (32, 288), (20, 480), (20, 560), (32, 720), (28, 720),
    ]  # fmt: skip
    assert deep_ep.Buffer.get_combine_config(4) == nccl_ep.Config(20, 9, 256, 6, 128)
    assert deep_ep.Buffer.get_combine_config(32) == nccl_ep.Config(20, 1, 288, 8, 128)
    assert deep_ep.Buffer.get_combine_config(3) == nccl_ep.Config() == nccl_ep.Config(20, 6, 256, 6, 256)
    assert nccl_ep.Config(num_sms=8).num_sms == 8
    for wrong, text in (((-2,), "num_sms is -2"), ((20, 6, 6), "sends of 6 .* receives of 6"), ((20, 0), "of 0 tokens"),
                        ((20, 6, 256, 6, 11), "at most half of receives of 11")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            nccl_ep.Config(*wrong)
    with pytest.raises(TypeError, match="num_sms is None, must be an integer"):
        nccl_ep.Config(None)  # type: ignore[arg-type]
    for hidden, ranks, text in (
        (-5, 2, "hidden_bytes is -5"),
        (128, 0, "num_ranks is 0"),
        (2**31, 2, "hidden_bytes is"),
    ):
        for hint in (nccl_ep.Config().get_nvl_buffer_size_hint, nccl_ep.Config().get_rdma_buffer_size_hint):
            with pytest.raises(ValueError, match=f"{text}.*, must be 1 to 2147483647"):
                hint(hidden, ranks)
    with pytest.raises(TypeError, match=r"num_max_nvl_chunked_send_tokens is 1\.5, must be an integer"):
        nccl_ep.Config(20, 1.5)  # type: ignore[arg-type]


def test_num_sms_is_one_number_for_all_buffers() -> None:
    try:
        with normal_buffer(None) as buffer:
            assert buffer.num_sms == deep_ep.Buffer.num_sms == 20
            buffer.set_num_sms(24)
            assert deep_ep.Buffer.num_sms == 24 and deep_ep.Buffer.get_dispatch_config(8).num_sms == 24
            deep_ep.Buffer.set_num_sms(6)
            assert buffer.num_sms == 6 and buffer.get_combine_config(160).num_sms == 6
            for wrong in (3, -2):
                with pytest.raises(ValueError, match=f"num_sms is {wrong}, must be even"):
                    deep_ep.Buffer.set_num_sms(wrong)
            for kind in (4.0, None):
                with pytest.raises(TypeError, match=f"num_sms is {kind}, must be an integer"):
                    deep_ep.Buffer.set_num_sms(kind)  # type: ignore[arg-type]
    finally:
        deep_ep.Buffer.set_num_sms(20)


@pytest.mark.parametrize(("ranks", "hidden"), [(1, 64), (2, 2880), (4, 7168), (8, 7168), (16, 4096), (64, 16384)])
def test_the_size_hint_suffices_and_wastes_little(ranks: int, hidden: int) -> None:
    """4096 tokens a rank fit, on one domain and on nodes of 8, and not much is left over."""
    config = nccl_ep.Config()
    nvl = config.get_nvl_buffer_size_hint(2 * hidden, ranks)
    rdma = config.get_rdma_buffer_size_hint(2 * hidden, ranks)
    assert nvl % 128 == rdma % 128 == 0 and (rdma > 0) == (ranks > 8)
    for num_bytes, domain in ((nvl, ranks), (nvl + rdma, min(ranks, 8))):
        sizes = sizes_for_bytes(num_bytes, ranks, domain)
        fitting = tokens_that_fit(sizes, ranks, domain, 256, 8, 2 * hidden)
        assert 4096 <= fitting < 4200
        assert sum(sizes[1:3]) + 2 * sum(sizes[3:5]) + sizes[5] <= num_bytes


def test_the_environment_changes_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nccl_ep.Config().get_nvl_buffer_size_hint(1024, 4)
    monkeypatch.setenv("NCCL_EP_HINT_TOKENS", "8192")
    num_bytes = nccl_ep.Config().get_nvl_buffer_size_hint(1024, 4)
    assert 8192 <= tokens_that_fit(sizes_for_bytes(num_bytes, 4, 4), 4, 4, 64, 8, 1024) < 8300 and num_bytes > before
    for wrong in ("many", "0", "-1"):
        monkeypatch.setenv("NCCL_EP_HINT_TOKENS", wrong)
        with pytest.raises(ValueError, match=f"NCCL_EP_HINT_TOKENS is '{wrong}', must be a number of tokens"):
            nccl_ep.Config().get_nvl_buffer_size_hint(1024, 4)


def test_the_buffer_of_deepeps_own_test_is_large_enough() -> None:
    """Its buffer of 1e9 bytes, 8 ranks, 4096 tokens, hidden 7168, top-8 of 256."""
    assert tokens_that_fit(sizes_for_bytes(int(1e9), 8, 8), 8, 8, 256, 8, 2 * 7168) >= 4096


def test_more_tokens_than_fit_are_refused_with_the_bytes_they_take() -> None:
    """Where no rank is asked, the error tells the bytes that it takes, and they do."""
    x, ids = torch.ones(3000, 512, dtype=HALF), torch.zeros(3000, 2, dtype=torch.int64)
    num_bytes = 1 << 20
    for _ in range(2):
        with deep_ep.Buffer(None, num_bytes, device="cpu") as buffer:
            per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 4)
            arguments = (x, None, per_rank, None, is_in_rank, per_expert, ids, torch.ones(3000, 2), 1, 3000)
            if num_bytes > 1 << 20:
                assert buffer.dispatch(*arguments)[0].shape == (3000, 512)
                break
            with pytest.raises(ValueError, match=r"3000 tokens of 1024 bytes, top-2, but .* room for \d+ of") as caught:
                buffer.dispatch(*arguments)
            num_bytes = int(str(caught.value).split("num_nvl_bytes=")[1].split()[0])
    assert num_bytes == bytes_for_tokens(3000, 1, 1, 1024, 2)


def test_a_buffer_for_shapes_serves_too() -> None:
    core = nccl_ep.Buffer.for_shapes(None, max_tokens=4, hidden=64, topk=2, num_experts=2, mode="ht", device="cpu")
    with deep_ep.Buffer.of(core) as buffer:
        rows, _, _, counts, handle, _ = buffer.dispatch(**normal_arguments(buffer))
        assert rows.shape == (2, 64) and counts == [1, 2]
        assert buffer.combine(rows, handle)[0][:, 0].tolist() == [1, 1, 0]


# ---- Bad input


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": None}, ValueError, "x has shape None"),
        ({"x": torch.ones(3, 4, 16)}, ValueError, r"x has shape \[3, 4, 16\], must be \[tokens, hidden\]"),
        ({"x": [1, 2]}, TypeError, "x is a int, must be a tensor"),
        ({"x": torch.ones(3, 64, device="meta")}, ValueError, "x is on meta, the buffer on cpu"),
        ({"x": torch.ones(64, 3).t()}, ValueError, "contiguous"),
        ({"x": torch.ones(3, 3)}, ValueError, "12 bytes"),
        ({"x": torch.ones(2, 64)}, ValueError, r"is_token_in_rank is torch.bool \[3, 1\], must be torch.bool \[2, 1\]"),
        ({"x": (torch.ones(3, 64), torch.ones(2, 4))}, ValueError, "scales"),
        ({"topk_weights": None}, ValueError, "topk_idx and topk_weights are given together"),
        ({"topk_idx": None}, ValueError, "topk_idx and topk_weights are given together"),
        ({"topk_idx": torch.zeros(3, 2)}, ValueError,
         r"topk_idx is torch.float32 \[3, 2\], must be torch.int64 or torch.int32"),
        ({"topk_idx": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, r"topk_idx has shape \[2, 2\], must be \[3"),
        ({"topk_weights": torch.ones(3, 3)}, ValueError, r"topk_weights has shape \[3, 3\]"),
        ({"topk_idx": torch.zeros(3, 2, dtype=torch.int64)}, ValueError,
         r"is_token_in_rank\[2, 0\] is False, but token 2 chose experts \[0, 0\] of 2"),
        ({"num_tokens_per_rank": None}, ValueError, "must be given without a handle"),
        ({"is_token_in_rank": None}, ValueError, "must be given without a handle"),
        ({"num_tokens_per_expert": None}, ValueError, "must be given without a handle"),
        ({"num_tokens_per_rank": torch.zeros(2, dtype=torch.int32)}, ValueError, r"per_rank is torch.int32 \[2"),
        ({"num_tokens_per_expert": torch.zeros(2)}, ValueError, "num_tokens_per_expert is torch.float32"),
        ({"num_tokens_per_expert": torch.zeros(0, dtype=torch.int32)}, ValueError, "0 experts do not divide"),
        ({"is_token_in_rank": torch.zeros(3, 1)}, ValueError, r"is_token_in_rank is torch.float32 \[3, 1\]"),
        ({"expert_alignment": 0}, ValueError, "expert_alignment is 0"),
        ({"expert_alignment": 1.5}, TypeError, r"expert_alignment is 1\.5, must be an integer"),
        ({"x": (torch.ones(3, 64),)}, ValueError, "x has 1 elements, must be a tensor, or a pair of rows and scales"),
        ({"config": {}}, TypeError, "config is a dict, must be a Config"),
        ({"previous_event": "x"}, TypeError, "previous_event is a str, must be what an operation returned"),
        ({"expert_alignment": None}, TypeError, "expert_alignment is None, must be an integer"),
        ({"expert_alignment": 2**40}, ValueError, "expert_alignment is 1099511627776, beyond 32 bits"),
        ({"num_worst_tokens": None}, TypeError, "num_worst_tokens is None, must be an integer"),
        ({"num_worst_tokens": 2**40}, ValueError, "num_worst_tokens is 1099511627776, beyond 32 bits"),
        ({"async_finish": "no"}, TypeError, "async_finish is 'no', must be True or False"),
        ({"allocate_on_comm_stream": 2}, TypeError, "allocate_on_comm_stream is 2, must be True or False"),
        ({"num_worst_tokens": -1}, ValueError, "num_worst_tokens is -1"),
        ({"num_worst_tokens": 8, "topk_idx": None, "topk_weights": None}, ValueError, "num_worst_tokens is 8"),
        ({"allocate_on_comm_stream": True, "async_finish": True}, ValueError, "needs previous_event and async_finish"),
    ],
)  # fmt: skip
def test_a_bad_dispatch_is_refused_and_harms_nothing(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with normal_buffer(None) as buffer:
        good = normal_arguments(buffer)
        with pytest.raises(error, match=text):
            buffer.dispatch(**{**good, **changes})
        assert buffer.dispatch(**good)[3] == [1, 2]  # nothing was sent, nothing is harmed
        assert buffer.stats()["ht_dispatches"] == 2  # the counts, the rows


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": torch.ones(3, 64, dtype=HALF)}, ValueError, r"x has shape \[3, 64\], must be \[2, hidden\]"),
        ({"x": torch.ones(2, 64, dtype=torch.int16)}, ValueError, "must be torch.bfloat16"),
        ({"x": torch.ones(64, 2, dtype=HALF).t()}, ValueError, "contiguous"),
        ({"x": None}, ValueError, "x has shape"),
        (
            {"topk_weights": torch.ones(2, 3)},
            ValueError,
            r"topk_weights is torch.float32 \[2, 3\], must be .* \[2, 2\]",
        ),
        ({"topk_weights": torch.ones(2, 2, dtype=HALF)}, ValueError, "topk_weights is torch.bfloat16"),
        ({"bias": torch.ones(3, 64)}, ValueError, "bias is torch.float32, must be torch.bfloat16"),
        ({"bias": torch.ones(2, 64, dtype=HALF)}, ValueError, r"bias has shape \[2, 64\], must be \[3, 64\]"),
        ({"bias": (torch.ones(3, 64, dtype=HALF),) * 3}, ValueError, "3 biases, at most 2"),
        ({"bias": ("one",)}, TypeError, "bias 0 is a str"),
        ({"bias": {}}, TypeError, "bias is a dict, must be a tensor, or two of them"),
        ({"bias": 5}, TypeError, "bias is a int, must be a tensor, or two of them"),
        ({"async_finish": ()}, TypeError, "async_finish is a tuple, must be True or False"),
        ({"allocate_on_comm_stream": True}, ValueError, "needs previous_event and async_finish"),
    ],
)
def test_a_bad_combine_is_refused_and_harms_nothing(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with normal_buffer(None) as buffer:
        rows, _, _, _, handle, _ = buffer.dispatch(**normal_arguments(buffer))
        good = {"x": rows, "handle": handle}
        with pytest.raises(error, match=text):
            buffer.combine(**{**good, **changes})
        assert buffer.combine(**good)[0][:, 0].tolist() == [1, 1, 0]
        assert buffer.stats()["ht_combines"] == 1


def test_a_handle_that_is_none() -> None:
    with normal_buffer(None) as buffer:
        arguments = normal_arguments(buffer)
        rows, _, _, _, handle, _ = buffer.dispatch(**arguments)
        bad: list[tuple[Any, type[Exception], str]] = [
            (None, ValueError, "the handle is NoneType, must be the 6 tensors"),
            (handle[:5], ValueError, "the handle is 5 elements"),
            ((*handle[:5], 3), TypeError, r"handle\[5\] is a int"),
            ([None] * 6, TypeError, r"handle\[0\] is None, must be a tensor"),
            ((*handle[:2], handle[0], *handle[3:]), ValueError, "it is not what dispatch returned"),
            ((handle[0], handle[1][:-4], *handle[2:]), ValueError, "the handle's route has shape"),
        ]
        for wrong, error, text in bad:
            with pytest.raises(error, match=text):
                buffer.combine(rows, wrong)
        with pytest.raises(ValueError, match="a cached dispatch moves x alone"):
            buffer.dispatch(arguments["x"], handle, topk_idx=arguments["topk_idx"])
        with pytest.raises(ValueError, match=r"must be \[3, hidden\]"):
            buffer.dispatch(torch.ones(2, 64), handle)
        handle[1][0] = -5
        with pytest.raises(ValueError, match="the handle is not of these sizes, or was changed"):
            buffer.combine(rows, handle)


def test_wider_rows_than_those_of_the_dispatch_are_refused() -> None:
    """A window grows in a dispatch; what its handle serves later has to fit."""
    with deep_ep.Buffer(None, 1 << 17, device="cpu") as buffer:
        arguments = normal_arguments(buffer)
        rows, _, _, _, handle, _ = buffer.dispatch(**arguments)
        calls: list[Callable[[], Any]] = [
            lambda: buffer.combine(rows.repeat(1, 500), handle),
            lambda: buffer.dispatch(arguments["x"].repeat(1, 500), handle),
        ]
        for call in calls:
            with pytest.raises(
                ValueError, match=r"for 3 tokens, but the window .* has room for \d of them: those of the"
            ):
                call()
        assert buffer.combine(rows, handle)[0][:, 0].tolist() == [1, 1, 0]


def test_a_layout_that_cannot_be_is_refused() -> None:
    with normal_buffer(None) as buffer:
        for ids, experts, text in (
            (torch.zeros(3), 2, r"topk_idx is torch.float32 \[3\]"),
            (torch.zeros(3, 2, dtype=torch.int16), 2, "torch.int16"),
            (torch.zeros(3, 2, dtype=torch.int64), 0, "0 experts do not divide over 1 ranks"),
        ):
            with pytest.raises(ValueError, match=text):
                buffer.get_dispatch_layout(ids, experts)
        ids = torch.zeros(3, 2, dtype=torch.int64)
        for experts, error, text in (
            (None, TypeError, "num_experts is None, must be an integer"),
            (2.0, TypeError, r"num_experts is 2\.0, must be an integer"),
            (2**40, ValueError, "num_experts is 1099511627776, beyond 32 bits"),
        ):
            with pytest.raises(error, match=text):
                buffer.get_dispatch_layout(ids, experts)
        with pytest.raises(TypeError, match="async_finish is a list, must be True or False"):
            buffer.get_dispatch_layout(ids, 2, async_finish=[])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="needs previous_event"):
            buffer.get_dispatch_layout(torch.zeros(3, 2, dtype=torch.int64), 2, allocate_on_comm_stream=True)


def test_a_buffer_without_room_says_how_to_make_one() -> None:
    """One made for low latency alone, and one that is gone."""
    with deep_ep.Buffer(None, 0, 1 << 21, low_latency_mode=True, device="cpu") as buffer:
        arguments = normal_arguments(buffer)
        with pytest.raises(ValueError, match="without room for the normal mode: give num_nvl_bytes"):
            buffer.dispatch(**arguments)
    buffer = normal_buffer(None)
    rows, _, _, _, handle, _ = buffer.dispatch(**arguments)
    buffer.destroy()
    for call in (lambda: buffer.dispatch(**arguments), lambda: buffer.combine(rows, handle)):
        with pytest.raises(nccl_ep.UsageError, match="destroyed"):
            call()


def test_a_rank_that_does_not_come() -> None:
    case = small_case(2)

    def body(group: ThreadGroup) -> None:
        with normal_buffer(group) as buffer:
            if group.rank() == 0:
                buffer.set_timeout(0.3)
                with pytest.raises(nccl_ep.TimeoutError, match="nothing of this call was heard from rank 1"):
                    case.send(buffer)

    run_ranks(2, body)


def test_ranks_that_call_otherwise_are_told() -> None:
    """One gives num_worst_tokens, the other has it count."""
    case, other = small_case(2), small_case(2)
    case.with_topk, case.worst, other.with_topk, other.worst = True, 0, True, 16

    def body(group: ThreadGroup) -> None:
        with normal_buffer(group) as buffer, pytest.raises(nccl_ep.MismatchError):
            (case, other)[group.rank()].send(buffer)

    run_ranks(2, body)
