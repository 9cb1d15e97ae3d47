"""DeepEP's low_latency_dispatch(use_nvfp4=True) on CPU ranks, against a quantiser of its own that goes by tables."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import struct
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import deep_ep
from nccl_ep.deep_ep.v1 import nvfp4
from nccl_ep.testing import ThreadGroup, run_ranks
from tests.deep_ep.low_latency_ranks import IDS, one_rank, rebuilt
from tests.support.patience import PATIENCE

BF16, FP16 = torch.bfloat16, torch.float16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# The positive e4m3 numbers by their codes: seven below 2^-6, then eight to each power of two; 0x7F is NaN.
E4M3 = [m / 512 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
NAN_CODE = 0x7F

# ---- The reference: one number after the other


def _float32(number: float) -> float:
    """Rounded to float32. A product or a quotient of two of these rounds here as it does in float32 itself."""
    return struct.unpack("f", struct.pack("f", number))[0]  # type: ignore[no-any-return]


def _nearest(number: float, table: list[float]) -> int:
    """The code of the nearest entry, of two the even one; the last for what is larger."""
    above = bisect.bisect_left(table, number)
    if above == len(table):
        return above - 1
    if above == 0 or table[above] == number:
        return above
    low, high = number - table[above - 1], table[above] - number
    return above if high < low or (high == low and above % 2 == 0) else above - 1


def _block(numbers: list[float], global_scale: float) -> tuple[list[int], int]:
    """Of 16 numbers the codes, and that of their scale."""
    signs = [8 if math.copysign(1, each) < 0 else 0 for each in numbers]
    if any(math.isnan(each) for each in numbers):
        return signs, NAN_CODE
    sixth = _float32(max(map(abs, numbers)) * _float32(1 / 6))
    code = _nearest(_float32(global_scale * sixth) if sixth < math.inf else math.inf, E4M3)
    if code == 0:
        return signs, 0
    factor = _float32(1 / _float32(E4M3[code] * _float32(1 / global_scale)))
    return [
        sign | _nearest(_float32(abs(each) * factor) if abs(each) < math.inf else math.inf, E2M1)
        for sign, each in zip(signs, numbers, strict=True)
    ], code


def quantised(x: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [T, H / 2] and bytes of scales [T, H / 16]."""
    rows, scales = [], []
    for numbers in x.tolist():
        blocks = [_block(numbers[i : i + 16], global_scale) for i in range(0, len(numbers), 16)]
        codes = [code for block, _ in blocks for code in block]
        rows.append([low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)])
        scales.append([scale for _, scale in blocks])
    tokens, hidden = x.shape
    as_bytes = functools.partial(torch.tensor, dtype=torch.uint8)
    return as_bytes(rows).view(tokens, hidden // 2), as_bytes(scales).view(tokens, hidden // 16)


def _numbers(rows: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """What bytes [.., H / 2] and bytes of scales [.., H / 16] stand for, float32 [.., H]."""
    codes = torch.stack([rows & 15, rows >> 4], -1).flatten(-2).long()
    factors = scales.view(torch.float8_e4m3fn).float() / global_scale
    return torch.tensor([*E2M1, *(-each for each in E2M1)])[codes] * factors.repeat_interleave(16, -1)


def test_the_tables_are_the_formats() -> None:
    """e4m3 as torch has it; 448 is its largest."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.float().tolist() == E4M3 and E4M3[-1] == 448


def _check_quantiser(x: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, scales = nvfp4.quantize(x, torch.tensor(global_scale))
    assert rows.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
    want_rows, want_scales = quantised(x, _float32(global_scale))
    assert torch.equal(scales.view(torch.uint8), want_scales), f"global scale {global_scale}"
    valid = (want_scales != NAN_CODE).repeat_interleave(8, 1)  # a block that is NaN is so whatever its elements
    assert torch.equal(rows[valid], want_rows[valid]), f"global scale {global_scale}"
    return rows, scales


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("global_scale", [1.0, 448 * 6 / 3.3, 0.01, 77.7, 1e6])
def test_random_numbers_are_quantised_as_by_hand(dtype: torch.dtype, global_scale: float) -> None:
    """Rows of very different sizes, so that scales are at both ends of e4m3, and zero."""
    made = torch.Generator().manual_seed(int(global_scale * 100))
    x = torch.randn(48, 96, generator=made) * torch.logspace(-7, 4, 48).unsqueeze(1)
    _check_quantiser(x.to(dtype), global_scale)


def test_every_middle_rounds_to_the_even_code() -> None:
    """The block's largest is 6, its scale 1: elements are their own values. Beside each middle on both sides, too."""
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(E2M1)])
    eps = 2.0**-20
    numbers = torch.cat([middles, middles * (1 - eps), middles * (1 + eps), torch.tensor(E2M1)])
    x = torch.zeros(2, 64)
    x[0, :29], x[1, :29] = numbers, -numbers
    x[:, 15::16] = 6.0
    rows, scales = _check_quantiser(x, 1.0)
    assert scales.float().eq(1).all()
    codes = torch.stack([rows[0] & 15, rows[0] >> 4], 1).flatten()
    assert codes[:7].tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_a_scale_that_lies_between_two() -> None:
    """amax / 6 in the middle of two e4m3 numbers, normal and not."""
    for low in (1, 2, 8, 40, 41, 77, 125):
        x = torch.full((1, 32), 6 * (E4M3[low] + E4M3[low + 1]) / 2)
        _, scales = _check_quantiser(x, 1.0)
        assert scales.view(torch.uint8)[0, 0] == low + low % 2


@pytest.mark.parametrize(("largest", "global_scale"), [(3.125, 3.0), (3.5, 9.0)])
def test_amax_times_a_sixth_is_not_amax_over_six(largest: float, global_scale: float) -> None:
    """Here the two give scales of different codes; DeepEP multiplies."""
    _check_quantiser(torch.full((1, 32), largest), global_scale)


def test_zeros_keep_their_sign_and_large_numbers_saturate() -> None:
    """Zeros keep their sign, what is too large saturates, and a NaN is not lost."""
    x = torch.zeros(7, 32)
    x[1] = -0.0
    x[2, 3], x[2, 4], x[2, 20] = math.inf, -math.inf, 5.0
    x[3, 3], x[3, 20] = math.nan, 5.0
    x[4], x[5] = 1e-30, 3e38
    x[6, 0] = -1e5
    rows, scales = _check_quantiser(x, 1.0)
    assert rows[0].eq(0).all() and rows[1].eq(0x88).all() and scales[:2].float().eq(0).all()
    assert scales[2].tolist()[0] == 448 and rows[2, 1] == 0x70 and rows[2, 2] == 0x0F
    assert scales[3, 0].isnan() and not scales[3, 1].isnan()


def test_quantised_numbers_come_back_within_half_a_step() -> None:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(32, 256, generator=made)
    global_scale = 448 * 6 / x.abs().max()
    rows, scales = nvfp4.quantize(x, global_scale)
    back = _numbers(rows, scales.view(torch.uint8), global_scale)
    half_a_step = x.view(32, -1, 16).abs().amax(2, keepdim=True) / 6
    assert ((back - x).view(32, -1, 16).abs() <= half_a_step * 1.15).all()  # e4m3 rounds by up to a sixteenth


@pytest.mark.parametrize("x", [torch.empty(0, 64), torch.ones(4, 64).t().contiguous().t(), torch.ones(4, 128)[:, ::2]])
def test_every_shape_is_quantised_as_by_hand(x: torch.Tensor) -> None:
    _check_quantiser(x, 1.0)


# ---- Dispatch and combine


def _straight(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """[L, rows, groups] bytes of the scales, element by element of [32, 4, rm, 4, rk, L]."""
    in_bytes = scales.view(torch.uint8)
    out = torch.empty(scales.shape[5], rows, groups, dtype=torch.uint8)
    for row in range(rows):
        for group in range(groups):
            lane, quarter = row % 128 % 32, row % 128 // 32
            out[:, row, group] = in_bytes[lane, quarter, row // 128, group % 4, group // 4]
    return out


class World:
    """What each rank sends, and what of it an expert must get, by a walk over all tokens."""

    def __init__(self, num_ranks: int, max_tokens: int, hidden: int, dtype: torch.dtype = BF16) -> None:
        made = torch.Generator().manual_seed(hidden + num_ranks)
        self.num_ranks, self.max_tokens, self.hidden = num_ranks, max_tokens, hidden
        self.num_experts, topk = 2 * num_ranks, 2
        tokens = [max_tokens - rank % 3 for rank in range(num_ranks)]
        self.x = [torch.randn(count, hidden, generator=made).to(dtype) for count in tokens]
        self.ids = [torch.rand(count, self.num_experts, generator=made).topk(topk).indices for count in tokens]
        for ids in self.ids:
            ids[::5, 1] = -1
        self.weights = [torch.rand(count, topk, generator=made) for count in tokens]
        self.global_scale = 448 * 6 / torch.stack([x.float().abs().max() for x in self.x]).max()
        self.sent = [quantised(x, float(self.global_scale)) for x in self.x]

    def buffer(self, group: ThreadGroup) -> deep_ep.Buffer:
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            self.max_tokens, self.hidden, self.num_ranks, self.num_experts
        )
        return deep_ep.Buffer(
            group, 0, hint, low_latency_mode=True, device="cpu", timeout=PATIENCE, on_invalid_ids="count"
        )

    def dispatch(self, buffer: deep_ep.Buffer, **options: Any) -> Any:
        """Inputs are overwritten as soon as the call is back."""
        x, ids = self.x[buffer.rank].clone(), self.ids[buffer.rank].clone()
        given = {"use_fp8": False, "use_nvfp4": True, "x_global_scale": self.global_scale.clone(), **options}
        result = buffer.low_latency_dispatch(x, ids, self.max_tokens, self.num_experts, **given)
        x.fill_(math.nan)
        ids.fill_(-7)
        given["x_global_scale"].fill_(math.nan)
        return result

    def check(self, rank: int, received: Any, counts: torch.Tensor, handle: Any) -> None:
        rows, scales = received
        local, capacity, groups = (
            self.num_experts // self.num_ranks,
            self.num_ranks * self.max_tokens,
            self.hidden // 16,
        )
        tiles, words = math.ceil(capacity / 128), math.ceil(self.hidden / 64)
        assert rows.dtype == torch.uint8 and rows.shape == (capacity, self.hidden // 2, local)
        assert rows.permute(2, 0, 1).is_contiguous()
        assert scales.dtype == torch.float8_e4m3fn and scales.shape == (32, 4, tiles, 4, words, local)
        assert scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
        assert handle[2:] == (self.max_tokens, self.hidden, self.num_experts)
        straight = _straight(scales, capacity, groups)
        for expert in range(local):
            want = [
                (source, token)
                for source, ids in enumerate(self.ids)
                for token in range(len(ids))
                if (ids[token] == rank * local + expert).any()
            ]
            assert int(counts[expert]) == len(want)
            assert handle[0][expert, : len(want)].tolist() == [token for _, token in want]
            for row, (source, token) in enumerate(want):
                assert torch.equal(rows[row, :, expert], self.sent[source][0][token])
                assert torch.equal(straight[expert, row], self.sent[source][1][token])

    def bf16_rows(self, received: Any) -> torch.Tensor:
        """[L, R * M, H], what a GEMM reads of the rows and scales."""
        rows, scales = received
        straight = _straight(scales, rows.shape[0], self.hidden // 16)
        return _numbers(rows.permute(2, 0, 1), straight, self.global_scale).bfloat16().contiguous()

    def check_combine(self, buffer: deep_ep.Buffer, received: Any, handle: Any) -> None:
        rank, rows = buffer.rank, self.bf16_rows(received)
        ids, weights = self.ids[rank], self.weights[rank]
        combined, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        assert combined.dtype == BF16 and not combined.isnan().any()
        want = _numbers(*self.sent[rank], self.global_scale) * weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), want, rtol=3 / 256, atol=1e-3)  # three roundings to bf16


WAYS = [{}, {"return_recv_hook": True}, {"async_finish": True}]


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens", "hidden"), [(1, 5, 32), (2, 9, 64), (2, 70, 160), (4, 32, 128), (4, 33, 96)]
)
def test_rows_and_scales_arrive(num_ranks: int, max_tokens: int, hidden: int) -> None:
    """Tiles of 128 rows, full or not; scales, a multiple of four or not. All at once, by a hook, and by an event."""
    world = World(num_ranks, max_tokens, hidden)

    def body(group: ThreadGroup) -> None:
        with world.buffer(group) as buffer:
            for way in WAYS:
                received, counts, handle, event, hook = world.dispatch(buffer, **way)
                assert (hook is not None) == bool(way.get("return_recv_hook"))
                assert (event.event is not None) == bool(way.get("async_finish"))
                if hook is not None:
                    hook()
                if event.event is not None:
                    event.current_stream_wait()
                world.check(group.rank(), received, counts, handle)
                world.check_combine(buffer, received, rebuilt(handle))

    run_ranks(num_ranks, body)


def test_rows_arrive_over_domains_and_in_fp16() -> None:
    world = World(4, 6, 64, FP16)
    sizes: dict[str, Any] = {"max_tokens": 6, "hidden": 64, "topk": 2, "num_experts": 8, "device": "cpu"}

    def body(group: ThreadGroup) -> None:
        core = nccl_ep.Buffer.for_shapes(group, **sizes, domain_size=2, timeout=PATIENCE)
        with deep_ep.Buffer.of(core) as buffer:
            for staged in (False, True):
                received, counts, handle, _, hook = world.dispatch(buffer, return_recv_hook=staged)
                if hook is not None:
                    hook()
                world.check(group.rank(), received, counts, handle)

    run_ranks(4, body)


def test_a_masked_rank_is_left_out() -> None:
    """As with FP8: nothing comes from it, and the others' rows are whole."""
    world = World(2, 4, 64)
    sizes: dict[str, Any] = {"max_tokens": 4, "hidden": 64, "topk": 2, "num_experts": 4, "device": "cpu"}

    def body(group: ThreadGroup) -> None:
        core = nccl_ep.Buffer.for_shapes(group, **sizes, enable_shrink=True, timeout=PATIENCE)
        with deep_ep.Buffer.of(core) as buffer:
            group.allgather(b"", PATIENCE)
            buffer.low_latency_update_mask_buffer(1 - group.rank(), True)
            received, counts, handle, _, _ = world.dispatch(buffer)
            alone = [ids if rank == group.rank() else ids[:0] for rank, ids in enumerate(world.ids)]
            mine = World(2, 4, 64)
            mine.ids = alone
            mine.check(group.rank(), received, counts, handle)
            group.allgather(b"", PATIENCE)

    run_ranks(2, body)


def test_dispatches_of_other_formats_between_change_nothing() -> None:
    """bf16, FP8 and NVFP4 in turn on one buffer. A factor without use_nvfp4 has no meaning."""
    world = World(2, 8, 128)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        stats, waits = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        with world.buffer(group) as buffer:
            for _ in range(2):
                rows, _, _, _, _ = world.dispatch(buffer, use_nvfp4=False)
                assert rows.dtype == BF16 and rows.shape == (2, 16, 128)
                (rows, _), _, _, _, _ = world.dispatch(buffer, use_nvfp4=False, use_fp8=True)
                assert rows.dtype == torch.float8_e4m3fn
                received, counts, handle, _, _ = world.dispatch(
                    buffer, cumulative_local_expert_recv_stats=stats, dispatch_wait_recv_cost_stats=waits
                )
                world.check(rank, received, counts, handle)
            assert stats.tolist() == (2 * counts).tolist() and waits[rank] == 0

    run_ranks(2, body)


def test_ranks_that_disagree_are_told() -> None:
    world = World(2, 4, 64)

    def body(group: ThreadGroup) -> None:
        with world.buffer(group) as buffer, pytest.raises(nccl_ep.MismatchError):
            world.dispatch(buffer, use_nvfp4=group.rank() == 0)

    run_ranks(2, body)


def _dispatch(buffer: deep_ep.Buffer, **changes: Any) -> Any:
    good = {
        "x": torch.ones(3, 64).bfloat16(), "topk_idx": IDS, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 2,
        "use_fp8": False, "use_nvfp4": True, "x_global_scale": torch.ones(()),
    }  # fmt: skip
    return buffer.low_latency_dispatch(**{**good, **changes})


@pytest.mark.parametrize("scale", [torch.full((1,), 8.0), torch.full((2,), 8.0), torch.tensor(8.0).expand(2, 3)])
def test_a_factor_may_have_any_shape(scale: torch.Tensor) -> None:
    """vLLM gives one for each expert, all alike."""
    with one_rank() as buffer:
        (rows, scales), *_ = _dispatch(buffer, x_global_scale=scale)
        want_rows, want_scales = quantised(torch.ones(1, 64), 8.0)
        assert torch.equal(rows[0, :, 0], want_rows[0])
        assert torch.equal(_straight(scales, 1, 4)[0, 0], want_scales[0])


def test_without_a_factor_it_is_one() -> None:
    with one_rank() as buffer:
        for given, same in zip(_dispatch(buffer, x_global_scale=None)[0], _dispatch(buffer)[0], strict=True):
            assert torch.equal(given[0].view(torch.uint8), same[0].view(torch.uint8)) and given.shape == same.shape


def test_a_factor_may_come_by_position() -> None:
    """sgl-deep-ep has it before use_fp8; DeepEP has no such argument there."""
    x, factor = torch.ones(3, 64).bfloat16(), torch.full((), 8.0)
    with one_rank() as buffer:
        (rows, scales), *_ = _dispatch(buffer, x_global_scale=factor)

        def same(received: tuple[torch.Tensor, torch.Tensor], want: torch.Tensor) -> bool:
            return torch.equal(received[0][0, :, 0], want[0, :, 0]) and received[1].shape == scales.shape

        by_order = buffer.low_latency_dispatch(x, IDS, 4, 2, None, None, factor, False, False, False, True, False, True)
        by_order[4]()  # return_recv_hook is the last one
        assert same(by_order[0], rows)
        in_part = buffer.low_latency_dispatch(x, IDS, 4, 2, None, None, factor, use_fp8=False, use_nvfp4=True)
        assert same(in_part[0], rows) and in_part[4] is None
        plain = buffer.low_latency_dispatch(x, IDS, 4, 2, None, None, None, False)
        assert plain[0].dtype == torch.bfloat16
        deepeps = buffer.low_latency_dispatch(x, IDS, 4, 2, None, None, False, False, False, True)
        assert deepeps[0].dtype == torch.bfloat16 and deepeps[3].event is not None
        for order, text in (
            ((False, False, False, False, False, False), "got 6 values after the counts, at most 5"),
            ((None, *[False] * 7), "got 8 values after the counts, at most 7"),
        ):
            with pytest.raises(TypeError, match=text):
                buffer.low_latency_dispatch(x, IDS, 4, 2, None, None, *order)
        with pytest.raises(TypeError, match="got multiple values for argument 'use_fp8'"):
            buffer.low_latency_dispatch(x, IDS, 4, 2, None, None, True, use_fp8=False)


def test_a_rank_without_tokens_sends_nothing() -> None:
    with one_rank() as buffer:
        for staged in (False, True):
            _, counts, _, _, hook = _dispatch(
                buffer, x=torch.empty(0, 64).bfloat16(), topk_idx=IDS[:0], return_recv_hook=staged
            )
            if hook is not None:
                hook()
            assert counts.tolist() == [0, 0]


@pytest.mark.parametrize("sends_in", [False, True])
def test_a_hook_may_run_in_another_mode_than_the_call(sends_in: bool) -> None:
    with one_rank() as buffer:
        with torch.inference_mode(sends_in):
            (rows, scales), counts, _, _, hook = _dispatch(buffer, return_recv_hook=True)
        with torch.inference_mode(not sends_in):
            hook()
        assert counts.tolist() == [2, 3] and rows[0, 0, 0] == 0x77 and scales[0, 0, 0, 0, 0, 0].float() > 0


@pytest.mark.parametrize("staged", [False, True])
def test_a_backward_pass_is_refused(staged: bool) -> None:
    with one_rank() as buffer:
        x = torch.ones(3, 64).bfloat16().requires_grad_()
        (_, scales), _, _, _, hook = _dispatch(buffer, x=x, return_recv_hook=staged)
        if hook is not None:
            hook()
        assert scales.requires_grad
        with pytest.raises(RuntimeError, match="derivative for low_latency_dispatch with use_nvfp4 is not implemented"):
            scales.float().sum().backward()
        with torch.no_grad():
            assert not _dispatch(buffer, x=x)[0][1].requires_grad


# ---- What is refused


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"use_fp8": True}, ValueError, r"use_fp8 is True \(its default is True\) and use_nvfp4 is set: they exclude"),
        ({"use_nvfp4": "yes"}, TypeError, "use_nvfp4 is 'yes', must be True or False"),
        ({"x_global_scale": 2.5}, TypeError, "x_global_scale is 2.5, must be a tensor"),
        ({"x_global_scale": torch.ones(1).double()}, ValueError, r"x_global_scale is torch.float64 \[1\], must be"),
        ({"x_global_scale": torch.ones(0)}, ValueError, r"x_global_scale is torch.float32 \[0\], .* with an element"),
        ({"x_global_scale": torch.ones((), device="meta")}, ValueError, "x_global_scale is on meta, the buffer on cpu"),
        ({"x_global_scale": torch.tensor(0.0)}, ValueError, "x_global_scale is 0.0, must be positive and finite"),
        ({"x_global_scale": torch.tensor(-2.0)}, ValueError, "x_global_scale is -2.0, must be positive and finite"),
        ({"x_global_scale": torch.tensor(math.inf)}, ValueError, "x_global_scale is inf, must be positive and finite"),
        ({"x_global_scale": torch.tensor(math.nan)}, ValueError, "x_global_scale is nan, must be positive and finite"),
        ({"use_ue8m0_for_sf": True}, TypeError, r"low_latency_dispatch\(use_ue8m0_for_sf=True\) is not served"),
        ({"use_ue8m0_for_sf": 3}, TypeError, "use_ue8m0_for_sf is 3, must be True or False"),
        ({"x": None}, TypeError, "x is None, must be a tensor"),
        ({"x": torch.ones(3, 64)}, ValueError, "x is torch.float32, with use_nvfp4 it must be torch.bfloat16 or"),
        ({"x": torch.ones(3, 64, dtype=torch.uint8)}, ValueError, "x is torch.uint8, with use_nvfp4 it must be"),
        ({"x": torch.ones(3, 48).bfloat16()}, ValueError, r"x has shape \[3, 48\], .* hidden must be a multiple of 32"),
        ({"x": torch.ones(3, 40).bfloat16()}, ValueError, r"x has shape \[3, 40\], .* hidden must be a multiple of 32"),
        ({"x": torch.ones(3, 0).bfloat16()}, ValueError, r"x has shape \[3, 0\], .* hidden must be a multiple of 32"),
        ({"x": torch.ones(192).bfloat16()}, ValueError, r"x has shape \[192\], must be \[tokens, hidden\]"),
        ({"x": torch.ones(3, 1 << 14).bfloat16()}, ValueError, "window is too small"),
        ({"x": torch.ones(3, 64, device="meta").bfloat16()}, ValueError, "x is on meta, the buffer on cpu"),
        ({"topk_idx": IDS[:2]}, ValueError, r"topk_idx has shape \[2, 2\], must be \[3"),
        ({"num_max_dispatch_tokens_per_rank": 2}, ValueError, "3 tokens, but num_max_dispatch_tokens_per_rank is 2"),
        ({"async_finish": True, "return_recv_hook": True}, ValueError, "async_finish and return_recv_hook are both"),
        ({"use_nvfp5": True}, TypeError, "unexpected keyword argument 'use_nvfp5'"),
    ],
)
def test_a_bad_dispatch_is_refused_and_harms_nothing(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Nothing is sent, and the next call is unharmed."""
    with one_rank() as buffer:
        with pytest.raises(error, match=text):
            _dispatch(buffer, **changes)
        assert buffer.stats()["dispatches"] == 0
        assert _dispatch(buffer)[1].tolist() == [2, 3]


def test_sends_that_were_not_received() -> None:
    with one_rank() as buffer:
        *_, hook = _dispatch(buffer, return_recv_hook=True)
        with pytest.raises(nccl_ep.UsageError, match="has not been received"):
            _dispatch(buffer)
        hook()
        with pytest.raises(nccl_ep.UsageError, match="called already"):
            hook()
        _dispatch(buffer, return_recv_hook=True)  # its hook is gone: the next call receives it
        assert _dispatch(buffer)[1].tolist() == [2, 3]


# ---- Natively: rows that the caller has quantised


@pytest.mark.parametrize("scales_dtype", [torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_quantised_rows_travel_with_their_scales(num_ranks: int, mode: str, scales_dtype: torch.dtype) -> None:
    """uint8 [T, H / 2] and a byte for 16 elements, by nccl_ep.dispatch(scales=). Combine takes bf16."""
    world = World(num_ranks, 6, 96)

    def body(group: ThreadGroup) -> None:
        rank = group.rank()
        rows, scales = nvfp4.quantize(world.x[rank], world.global_scale)
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=6, hidden=96, topk=2, num_experts=world.num_experts, mode="auto", device="cpu",
            timeout=PATIENCE,
        ) as buffer:  # fmt: skip
            for layout in ("expert_major", "packed", "flat"):
                out = nccl_ep.dispatch(
                    rows, world.ids[rank], world.weights[rank], buffer=buffer, num_experts=world.num_experts,
                    layout=layout, mode=mode, scales=scales.view(scales_dtype),
                    capacity=6 * num_ranks if layout == "expert_major" else None,
                )  # fmt: skip
                assert out.x.dtype == torch.uint8 and out.x.shape[-1] == 48
                assert out.scales is not None and out.scales.dtype == scales_dtype and out.scales.shape[-1] == 6
                _check_native(world, rank, layout, out)
                ones = torch.ones(*out.x.shape[:-1], 96).bfloat16()
                combined = nccl_ep.combine(ones, out.handle)
                assert combined.shape == world.x[rank].shape and combined.dtype == BF16

    run_ranks(num_ranks, body)


def _check_native(world: World, rank: int, layout: str, out: nccl_ep.DispatchOutput) -> None:
    """Every row with its scales, in the order of (expert, source, token), or of (source, token)."""
    assert out.scales is not None
    local = world.num_experts // world.num_ranks
    mine = range(rank * local, (rank + 1) * local)
    tokens = [(source, token) for source, ids in enumerate(world.ids) for token in range(len(ids))]
    if layout == "flat":
        bins = [[at for at in tokens if any(int(e) in mine for e in world.ids[at[0]][at[1]])]]
        starts = [0]
    else:
        bins = [[at for at in tokens if expert in world.ids[at[0]][at[1]].tolist()] for expert in mine]
        if layout == "packed":
            assert out.offsets is not None
            starts = out.offsets.tolist()[:-1]
        else:
            starts = [expert * out.x.shape[1] for expert in range(local)]
    rows, scales = out.x.view(-1, 48), out.scales.view(torch.uint8).view(-1, 6)
    for first, wanted in zip(starts, bins, strict=True):
        for row, (source, token) in enumerate(wanted, first):
            assert torch.equal(rows[row], world.sent[source][0][token])
            assert torch.equal(scales[row], world.sent[source][1][token])
    assert int(out.total if layout == "flat" and out.total is not None else out.counts.sum()) == sum(map(len, bins))
