"""The numbers of an operation: one table, packed and read in its order; and rules that Python has once more."""

from __future__ import annotations

import itertools
import typing
from typing import Any

import pytest
import torch

import nccl_ep
from nccl_ep import _C, config, modes
from nccl_ep.choices import QuantName
from nccl_ep.handle import Layout, Quant

T, H, K, E = 3, 32, 2, 4


@pytest.fixture
def buffer() -> Any:
    with nccl_ep.Buffer.for_shapes(None, max_tokens=T, hidden=H, topk=K, num_experts=E, device="cpu") as made:
        yield made


def test_fields_are_packed_in_the_order_of_the_table() -> None:
    names = [option.name for option in _C.dispatch_options()]
    assert config.pack_dispatch(dict(zip(names, range(7, 99), strict=False))) == tuple(range(7, 7 + len(names)))
    assert config.pack_dispatch({}) == tuple(option.default for option in _C.dispatch_options())
    assert config.pack_dispatch({"zero_padding": True})[names.index("zero_padding")] == 1
    names = [option.name for option in _C.combine_options()]
    packed = list(range(len(names)))
    packed[names.index("scale")] = 0x40200000
    assert config.pack_combine({**dict(zip(names, packed, strict=True)), "scale": 2.5}) == tuple(packed)


def test_a_field_can_be_changed_and_read_by_its_name() -> None:
    packed = config.pack_dispatch({"num_experts": 8, "quant": 2})
    assert config.dispatch_fields(packed) | {"quant": 0} == config.dispatch_fields(
        config.replace_field(packed, "quant", 0)
    )
    assert config.dispatch_fields(packed)["num_experts"] == 8


def test_an_option_is_described_by_its_kind_its_range_and_its_modes() -> None:
    options = {option.name: option for option in (*_C.dispatch_options(), *_C.combine_options())}
    padding, quant, signals = options["zero_padding"], options["quant"], options["rows_per_signal"]
    assert (padding.kind, padding.default, padding.least, padding.most, padding.modes) == (
        "flag", False, False, True, "both",
    )  # fmt: skip
    assert (quant.kind, quant.default, quant.least, quant.most) == ("choice", 0, 0, 7)
    assert (signals.kind, signals.default, signals.least, signals.modes) == ("integer", 0, 1, "both")
    scale = options.pop("scale")
    assert (scale.kind, scale.default, scale.modes, scale.number(2.5)) == ("float", 1.0, "both", 0x40200000)
    for option in options.values():
        assert option.number(option.default) == option.default


@pytest.mark.parametrize(
    "name, value, number",
    [
        ("zero_padding", True, 1), ("zero_padding", 0, 0), ("zero_padding", None, 0),
        ("zero_padding", torch.tensor(True), 1), ("num_sms", 7, 7), ("num_sms", torch.tensor(7), 7),
        ("num_sms", True, 1), ("quant", 3, 3),
    ],
)  # fmt: skip
def test_values_of_an_options_kind_are_taken(name: str, value: object, number: int) -> None:
    assert _option(name).number(value) == number


@pytest.mark.parametrize(
    "name, value, kind, text",
    [
        ("zero_padding", 2, TypeError, "zero_padding is 2, must be True or False"),
        ("zero_padding", "yes", TypeError, "zero_padding is 'yes', must be True or False"),
        ("zero_padding", torch.ones(2), TypeError, "zero_padding is a Tensor, must be True or False"),
        ("num_sms", 1.5, TypeError, "num_sms is 1.5, must be an integer"),
        ("num_sms", None, TypeError, "num_sms is None, must be an integer"),
        ("num_sms", [1], TypeError, "num_sms is a list, must be an integer"),
        ("num_sms", -1, ValueError, "num_sms is -1, must not be negative"),
        ("num_sms", 1 << 31, ValueError, "num_sms is 2147483648, must be from 0 to 2147483647"),
        ("num_sms", 1 << 70, ValueError, "num_sms is 1180591620717411303424, must be from 0 to 2147483647"),
        ("quant", 8, ValueError, "quant 8 is unknown, must be from 0 to 7"),
    ],
)
def test_values_of_another_kind_or_out_of_range_are_refused(
    name: str, value: object, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as refused:
        _option(name).number(value)
    assert str(refused.value) == text


def _option(name: str) -> _C.Option:
    return next(option for option in _C.dispatch_options() if option.name == name)


@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_numbers_is_refused(buffer: nccl_ep.Buffer, change: int) -> None:
    packed = config.pack_dispatch({"num_experts": E, "topk": K, "max_tokens": T})
    wrong = packed[:change] if change < 0 else (*packed, 0)
    x, ids = torch.ones(T, H), torch.zeros(T, K, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"the config of a dispatch has {len(wrong)} numbers, must be {len(packed)}"):
        torch.ops.nccl_ep.ll_dispatch(buffer._seq, x, None, ids, None, T, wrong)


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("topk", 1, r"topk_idx has shape \[3, 2\], the config says top-1"),
        ("zero_padding", 2, "zero_padding is 2, must be 0 or 1"),
        ("quant", 9, "quant 9 is unknown"),
        ("layout", 4, "layout 4 is unknown"),
        ("num_sms", -1, "num_sms is -1, must not be negative"),
        ("all_weights", 1, "all_weights is set, but rows of layout expert_major have one weight each"),
        ("num_experts", 1 << 40, "num_experts is 1099511627776, beyond 32 bits"),
    ],
)
def test_a_wrong_number_is_refused_with_its_name(buffer: nccl_ep.Buffer, field: str, value: int, text: str) -> None:
    packed = config.pack_dispatch({"num_experts": E, "topk": K, "max_tokens": T})
    x, ids = torch.ones(T, H), torch.zeros(T, K, dtype=torch.int64)
    with pytest.raises(ValueError, match=text):
        torch.ops.nccl_ep.ll_dispatch(buffer._seq, x, None, ids, None, T, config.replace_field(packed, field, value))


def test_the_default_capacity_holds_all_that_may_come(buffer: nccl_ep.Buffer) -> None:
    ids = torch.tensor([[0, 1], [2, 3], [0, 3]])
    for layout in ("expert_major", "packed", "rank_major", "flat"):
        alignment = 4 if layout == "packed" else 1
        out = nccl_ep.dispatch(
            torch.ones(T, H), ids, buffer=buffer, num_experts=E, layout=layout, expert_alignment=alignment
        )
        rows = {"expert_major": T, "packed": 20, "rank_major": T, "flat": T}[layout]  # 6 rows, 3 of padding an expert
        assert out.handle.capacity == rows and out.x.shape[-2] == rows
        assert int(out.overflow) == 0


def test_auto_is_the_rule_of_the_library() -> None:
    for row_bytes, topk, ranks in itertools.product((0, 16, 1024, 14336, 65536), (1, 8, 32), (1, 2, 8, 64, 128)):
        most = _C.most_auto_ll_tokens(row_bytes, topk, ranks)
        for tokens in (max(most, 1), most + 1):
            assert modes.choose_mode(tokens, row_bytes, topk, ranks, None) == ("ll" if tokens <= most else "ht")


def test_enums_and_places_are_those_of_the_library() -> None:
    assert [layout.name.lower() for layout in Layout] == ["expert_major", "packed", "rank_major", "flat"]
    assert [quant.name.lower() for quant in Quant] == ["none", *typing.get_args(QuantName)]
    for layout, ranks in itertools.product(Layout, (1, 4)):
        bins, demand, overflow, total, offsets, size = _C.info_parts(int(layout), ranks, 8)
        info = torch.arange(size, dtype=torch.int32)
        handle = nccl_ep.Handle(info, torch.empty(0), 1, 1, 8, 1, layout, 1, ranks)
        out = nccl_ep.DispatchOutput.of_info(info, None, None, info, None, info, handle)
        assert out.counts.tolist() == list(range(bins)) and out.demand.tolist() == list(range(demand, demand + bins))
        assert out.overflow.tolist() == [overflow]
        assert out.total is None if layout != Layout.FLAT else out.total.tolist() == [total]
        assert out.offsets is None if layout != Layout.PACKED else out.offsets.tolist() == list(range(offsets, size))


@pytest.mark.parametrize("call", [nccl_ep.dispatch, nccl_ep.dispatch_send])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_under_autocast(buffer: nccl_ep.Buffer, dtype: torch.dtype, call: Any) -> None:
    x, ids, weights = torch.ones(T, H), torch.tensor([[0, 1], [2, 3], [0, 3]]), torch.rand(T, K).to(dtype)

    def run(given: torch.Tensor) -> torch.Tensor:
        out = call(x, ids, given, buffer=buffer, num_experts=E)
        received: torch.Tensor = (out.receive() if isinstance(out, nccl_ep.Pending) else out).weights
        return received

    with torch.autocast("cpu"):
        assert torch.equal(run(weights), run(weights.float()))
        with pytest.raises(ValueError, match=r"topk_weights is torch\.float64, must be torch\.float32"):
            run(weights.double())
    with pytest.raises(ValueError, match=r"topk_weights is torch.(bfloat16|float16), must be torch.float32"):
        run(weights)
