"""The calls of the rivals, by stand-ins of their libraries: what ``check`` holds against the tokens, and a layer over
them. This is rank 1 of 2, whose own tokens choose experts of its own alone."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.rivals import deepep_v1, flashinfer, nccl_ep_nvidia
from bench.rivals.interface import Rival
from bench.workload import Given, Shape
from examples.overlapped_moe.experts import Experts
from examples.overlapped_moe.others import OtherLayer, distance
from tests.examples.moe_reference import layer

T, H, K, EXPERTS, FIRST = 6, 64, 2, 8, 4


class Tokens:
    """What a dispatch of both ranks brings to rank 1."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        ids = [torch.rand(T, count, generator=draw).topk(K).indices + EXPERTS - count for count in (EXPERTS, 4)]
        self.given = [
            Given(torch.randn(T, H, generator=draw).bfloat16(), each, torch.rand(T, K, generator=draw)) for each in ids
        ]
        self.x, self.ids = (torch.stack([getattr(each, name) for each in self.given]) for name in ("x", "topk_idx"))
        self.weights = torch.stack([each.weights for each in self.given])
        self.here = (self.ids >= FIRST).any(2)  # [2, T]
        self.local = torch.where(self.ids >= FIRST, self.ids - FIRST, -1)
        self.count = int(self.here.sum())
        assert not self.here.all() and self.here[1].all()

    def by_expert(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [4, 2 * T, H] and counts."""
        rows = torch.full((4, 2 * T, H), torch.nan).bfloat16()
        counts = torch.zeros(4, dtype=torch.int32)
        for local in range(4):
            mine = self.x[(self.local == local).any(2)]
            rows[local, : len(mine)], counts[local] = mine, len(mine)
        return rows, counts

    def home_of(self, rows: torch.Tensor) -> torch.Tensor:
        """From rows by expert, weighted."""
        home = torch.zeros(T, H)
        for local in range(4):
            source, token = (self.local == local).any(2).nonzero(as_tuple=True)
            weights = torch.where(self.local == local, self.weights, 0).sum(2)
            for place, (rank, t) in enumerate(zip(source.tolist(), token.tolist(), strict=True)):
                if rank == 1:
                    home[t] += weights[1, t] * rows[local, place].float()
        return home.bfloat16()

    def flat(self, rows: int, garbage: int) -> tuple[torch.Tensor, ...]:
        """Rows, local ids and weights of ``rows`` by token; garbage: ids of those that do not exist."""
        x, ids = torch.full((rows, H), torch.nan).bfloat16(), torch.full((rows, K), garbage)
        weights = torch.full((rows, K), torch.nan)
        x[: self.count], ids[: self.count], weights[: self.count] = (
            each[self.here] for each in (self.x, self.local, self.weights)
        )
        return x, ids, weights


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
            if count > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module, raising=False)
    for member, value in members.items():
        monkeypatch.setattr(sys.modules[name], member, value, raising=False)


def of_flashinfer(monkeypatch: pytest.MonkeyPatch, tokens: Tokens, layout: str) -> Any:
    class MoeAlltoAll:
        def __init__(self, mapping: Any, **sizes: Any) -> None:
            self.workspace = torch.full((2, T, H), torch.nan).bfloat16()

        def dispatch(self, ids: Any, payloads: Any, most: int, **named: Any) -> Any:
            assert ids.dtype == torch.int32 and payloads[1] is ids and most == T
            came = tokens.ids.int().clone()
            if named:
                assert named == {"invalid_token_expert_id": -1, "expert_id_payload_index": 1}
                came[~tokens.here] = -1
            rows = torch.where(tokens.here[..., None], tokens.x, torch.nan)
            return rows, came, torch.where(tokens.here[..., None], tokens.weights, torch.nan)

        def get_combine_payload_tensor_in_workspace(self, most: int, hidden: int, dtype: Any) -> torch.Tensor:
            assert (most, hidden, dtype) == (T, H, torch.bfloat16)
            return self.workspace

        def combine(self, rows: torch.Tensor, most: int, payload_in_workspace: bool, output: torch.Tensor) -> None:
            assert rows.data_ptr() == self.workspace.data_ptr() and payload_in_workspace
            output.copy_(rows[1])

    stand_in(monkeypatch, "flashinfer.comm.mapping", Mapping=SimpleNamespace)
    stand_in(monkeypatch, "flashinfer.comm.mnnvl", MnnvlConfig=SimpleNamespace, TorchDistBackend=SimpleNamespace)
    stand_in(monkeypatch, "flashinfer.comm.trtllm_moe_alltoall", MoeAlltoAll=MoeAlltoAll)
    return flashinfer


def of_deepep(monkeypatch: pytest.MonkeyPatch, tokens: Tokens, layout: str) -> Any:
    class Buffer:
        def __init__(self, group: Any, **sizes: Any) -> None:
            assert sizes["explicitly_destroy"]

        @staticmethod
        def get_low_latency_rdma_size_hint(*sizes: int) -> int:
            return 1

        def low_latency_dispatch(self, x: Any, ids: Any, most: int, experts: int, use_fp8: bool) -> Any:
            assert x is tokens.given[1].x and (most, experts, use_fp8) == (T, EXPERTS, False)
            return (*tokens.by_expert(), "handle", None, None)

        def low_latency_combine(self, rows: Any, ids: Any, weights: Any, handle: str) -> Any:
            assert handle == "handle" and weights is tokens.given[1].weights
            return tokens.home_of(rows), None, None

        def get_dispatch_layout(self, ids: Any, experts: int) -> Any:
            return "ranks", None, "experts", "is in rank", None

        def dispatch(self, x: Any, num_worst_tokens: int, **named: Any) -> Any:
            assert named["num_tokens_per_rank"] == "ranks" and named["is_token_in_rank"] == "is in rank"
            return (*tokens.flat(num_worst_tokens or tokens.count, -1), [], "handle", None)

        def combine(self, rows: Any, handle: str) -> Any:
            assert handle == "handle"
            return rows[tokens.count - T : tokens.count], None, None

    stand_in(monkeypatch, "deep_ep", Buffer=Buffer, __file__="site/deep_ep/__init__.py")
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=None))
    return deepep_v1


def of_nccl_ep(monkeypatch: pytest.MonkeyPatch, tokens: Tokens, layout: str) -> Any:
    class Handle:
        def __init__(self, layout_info: Any = None) -> None:
            self.info = layout_info

        def update(self, ids: Any, layout_info: Any, stream: int) -> None:
            self.info = layout_info

        def dispatch(self, inputs: Any, outputs: Any, layout_info: Any = None, **named: Any) -> None:
            info = layout_info or self.info
            if layout == "expert_major":
                rows, counts = tokens.by_expert()
                outputs.tokens.copy_(rows)
                info.expert_counters.copy_(counts)
            elif layout == "rank_major":
                for source in range(2):
                    here = tokens.here[source]
                    count = int(here.sum())
                    info.src_rank_counters[source] = count
                    outputs.topk_idx[source] = 1  # of rows that do not exist, too
                    for out, each in (
                        (outputs.tokens, tokens.x), (outputs.topk_idx, tokens.local),
                        (outputs.topk_weights, tokens.weights),
                    ):  # fmt: skip
                        out[source, :count] = each[source][here].to(out.dtype)
            else:
                info.recv_total_counter.fill_(tokens.count)
                for out, each in zip(
                    (outputs.tokens, outputs.topk_idx, outputs.topk_weights), tokens.flat(2 * T, 1), strict=True
                ):
                    out.copy_(each)

        def combine(self, going: Any, coming: Any, stream: int) -> None:
            rows = going.tokens
            if layout == "expert_major":
                coming.tokens.copy_(tokens.home_of(rows))
            else:
                coming.tokens.copy_(rows[1] if layout == "rank_major" else rows[tokens.count - T : tokens.count])

    class Group:
        @staticmethod
        def create(comm: Any, config: Any) -> Any:
            return SimpleNamespace(create_handle=lambda layout, ids, layout_info=None, stream=0: Handle(layout_info))

    words = SimpleNamespace(LOW_LATENCY=0, HIGH_THROUGHPUT=1, EXPERT_MAJOR=0, RANK_MAJOR=1, FLAT=2, ON=1)
    kept = dict.fromkeys(
        ("GroupConfig", "LayoutInfo", "DispatchInputs", "DispatchOutputs", "CombineInputs", "CombineOutputs"),
        SimpleNamespace,
    )
    stand_in(
        monkeypatch, "nccl.ep", Group=Group, Tensor=lambda tensor, **_: tensor, Algorithm=words, Layout=words,
        ZeroCopyMode=words, DispatchQuantizationRecipe=words, get_lib_version=lambda: "0.2", **kept,
    )  # fmt: skip
    comm = SimpleNamespace(register_window=lambda memory, flag: "window")
    stand_in(monkeypatch, "nccl.ep.interop.torch", get_nccl_comm_from_group=lambda: comm)
    stand_in(monkeypatch, "nccl.core", WindowFlag=SimpleNamespace(COLL_SYMMETRIC=1))
    stand_in(monkeypatch, "nccl.core.interop.torch", empty=lambda sizes, **how: torch.zeros(sizes, **how))
    monkeypatch.setattr(nccl_ep_nvidia, "_stream", lambda: 0)
    return nccl_ep_nvidia


CASES = [
    (of_flashinfer, "ht", "rank_major"), (of_deepep, "ll", "expert_major"), (of_deepep, "ht", "flat"),
    (of_nccl_ep, "ll", "expert_major"), (of_nccl_ep, "ll", "rank_major"), (of_nccl_ep, "ht", "flat"),
]  # fmt: skip


@pytest.mark.parametrize(("library", "mode", "layout"), CASES)
def test_a_layer_over_their_calls(library: Any, mode: Any, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens()
    module = library(monkeypatch, tokens, layout)
    assert layout in module.layouts(mode, "bf16")
    world: Any = SimpleNamespace(
        rank=1, num_ranks=2, device=torch.device("cpu"), synchronize=lambda: None,
        gate=SimpleNamespace(wait=lambda: None),
    )  # fmt: skip
    shape = Shape(2, T, H, K, EXPERTS, "bf16", layout, "uniform", 1, mode)
    rival: Rival = module.make(world, shape, tokens.given)
    rival.check()
    assert "pair" in rival.ways[None].calls
    rival.ways[None].get("pair")()
    experts, given = Experts.random(4, H, 32, "cpu"), tokens.given[1]
    wanted = layer(given.x.float(), given.topk_idx - FIRST, given.weights, experts.w13.float(), experts.w2.float())
    for how in (None, {}):
        for _ in range(2):
            over = OtherLayer(rival, experts, 4 * T * K, 4, how)
            over.require_room()
            assert distance(over(), wanted) < 0.02
    received = rival.receive()
    counts = over.order(received).counts if received.counts is None else received.counts
    assert counts.tolist() == [int((tokens.local == local).sum()) for local in range(4)]
    short = OtherLayer(rival, experts, 8, 4, None)
    if layout != "expert_major":
        with pytest.raises(AssertionError, match="rows came, and there is room for 8"):
            short.require_room()
