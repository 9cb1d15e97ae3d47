"""How long the host is kept by eager calls: python -m bench.measure_host RECORDS.json [--device cpu]

One rank; with torchrun, a GPU (or a CPU rank) each. Every figure is taken with and without torch.set_default_device,
whose mode sees each function of torch that Python calls.

host: one call, the least mean of many rounds, in which all calls take turns; the queue of a GPU is emptied between
rounds. "what follows": the hook of a method, or the wait for its event. event: an eager pair between two events (GPUs).
Ranks enter it after a barrier, and the least time of any rank counts: the others also wait for the one that entered
last. queued: the same, but pairs follow one another as in the benchmark of DeepEP's tests: no barrier and no wait of
the host between them. "bare": two launches of kernels that do nothing; "bare fork and join": two events and two waits,
from Python, which async_finish cannot do without. "ops": torch.ops by themselves, the floor of the native calls.
graph (GPUs, high throughput): a call of a captured chain of ten, the median of the slowest rank; the native calls write
given tensors (out=), those of DeepEP's methods allocate. Replays of all chains take turns. figure "ratio": of two
values that stand above it.

"deepep_like" is an estimate of what DeepEP V1 takes for its eager pair on the same host: the tensors it makes, its
events between two streams and its launches, called from Python, around kernels of the given times (--deepep-kernels,
--deepep-normal-kernels). In its normal mode the host also waits for the counts. "least" is the same without launches'
kernels, host alone.

The figures of high throughput: torchrun --nproc-per-node 2 -m bench.measure_host RECORDS.json --mode ht --tokens
4096
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import nccl_ep
from bench.records import FIELDS, Record, make, revision, save, today
from bench.world import join_torchrun
from nccl_ep import deep_ep
from nccl_ep.choices import Mode
from nccl_ep.config import combine_args, pack_dispatch
from nccl_ep.handle import LAYOUTS

Call = Callable[[], Any]
Then = Callable[[Any], Any]  # of what a call returned
Calls = tuple[dict[str, Call], dict[str, tuple[Call, Then]]]  # the second: methods with their hooks or waits
Measure = Callable[[], dict[str, float]]  # us, by what is added to the op's name
# torch has not typed them.
_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
_sleep: Callable[[int], None] = torch.cuda._sleep
CHAIN = 10  # calls in a graph
APIS = ("ops", "native", "deepep")
LOCAL_SIZES = {"cpu": (1, 16, 2, 4), "cuda": (128, 7168, 8, 256)}  # tokens, hidden, top-k, experts


def host_mean(call: Call, synchronize: Call, count: int) -> dict[str, float]:
    """Of one of ``count`` calls, in us; a GPU's queue does not fill up."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return {"": (time.perf_counter() - begin) / count * 1e6}


def host_means(call: Call, then: Then, synchronize: Call, count: int) -> dict[str, float]:
    """The same of a call, and of ``then(what it returned)`` behind it."""
    synchronize()
    first = second = 0.0
    for _ in range(count):
        begin = time.perf_counter()
        made = call()
        between = time.perf_counter()
        then(made)
        second += time.perf_counter() - between
        first += between - begin
    return {": the method": first / count * 1e6, ": what follows": second / count * 1e6}


def least(measures: dict[str, Measure], rounds: int) -> dict[str, float]:
    """Of many rounds, in which all take turns: a host's clock changes. The first round does not count."""
    taken = [
        {op + part: us for op, measure in measures.items() for part, us in measure().items()} for _ in range(1 + rounds)
    ]
    return {name: min(each[name] for each in taken[1:]) for name in taken[0]}


def of_all_ranks(mine: Any) -> list[Any]:
    """Collective. One rank has no group."""
    if not dist.is_initialized():
        return [mine]
    told = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return _event(enable_timing=True), _event(enable_timing=True)


def event_time(call: Call, barrier: Call, iterations: int) -> float:
    """Of one call in a GPU's time, in us: the median of the rank that entered last, which waits for no other."""
    events = [timing_events() for _ in range(iterations)]
    for start, end in events:
        torch.cuda.synchronize()
        start.record()  # the first one behind a wait takes 8 to 20 us
        end.record()
        barrier()
        start.record()
        call()
        end.record()
    return median_of_last(events)


def queued_time(call: Call, barrier: Call, iterations: int) -> float:
    """The same of calls that follow one another."""
    events = [timing_events() for _ in range(iterations)]
    torch.cuda.synchronize()
    barrier()
    for start, end in events:
        start.record()
        call()
        end.record()
    return median_of_last(events)


def median_of_last(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e3 for start, end in events]
    return float(median(min(each) for each in list(zip(*of_all_ranks(times), strict=True))[len(times) // 5 :]))


def captured_chain(call: Call, side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(CHAIN):
            call()
    return graph


def graph_times(calls: dict[str, Call], barrier: Call, iterations: int) -> dict[str, float]:
    """Of a call in its chain, in us: the median of this rank."""
    side = _stream()
    graphs = {name: captured_chain(call, side) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(iterations + 2):
        for name, graph in graphs.items():
            barrier()
            torch.cuda.synchronize()
            start, end = timing_events()
            _sleep(400_000)  # cycles, in which all hosts get ahead
            calls[name]()  # ends on all ranks at the same time
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if number >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / CHAIN)
    return {name: median(each) for name, each in times.items()}


def launch_nothing() -> None:
    _sleep(0)


def fork_and_join() -> Call:
    """What two streams need to take turns: each waits for an event of the other."""
    own, other = torch.cuda.current_stream(), _stream()
    first, last = _event(), _event()

    def call() -> None:
        first.record(own)
        first.wait(other)
        last.record(other)
        last.wait(own)

    return call


@contextlib.contextmanager
def default_device(device: str | None) -> Iterator[None]:
    if device is None:
        yield
        return
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def low_latency_calls(buffer: nccl_ep.Buffer, sizes: tuple[int, int, int, int], device: str) -> Calls:
    tokens, hidden, topk, experts = sizes
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.rand(tokens, experts, device=device).topk(topk, -1).indices
    weights = torch.rand(tokens, topk, device=device)
    how: dict[str, Any] = {"buffer": buffer, "num_experts": experts}
    out = nccl_ep.dispatch(x, ids, weights, **how)
    dest = torch.empty_like(x)
    rows = torch.zeros_like(out.x)
    ops = torch.ops.nccl_ep
    numbers = combine_args(out.handle, 1, x.dtype)
    config = pack_dispatch({"num_experts": experts, "topk": topk, "max_tokens": tokens})
    view = deep_ep.Buffer.of(buffer)
    use_fp8 = hidden % 128 == 0
    fp8: dict[str, Any] = {"use_fp8": use_fp8}
    handle = view.low_latency_dispatch(x, ids, tokens, experts, **fp8)[2]
    made = view.get_next_low_latency_combine_buffer(handle)
    made.zero_()

    combine = partial(view.low_latency_combine, made, ids, weights, handle)
    methods: dict[str, Call] = {
        "dispatch": partial(view.low_latency_dispatch, x, ids, tokens, experts, **fp8),
        "combine": combine,
        "combine out= zero_copy": partial(combine, zero_copy=True, out=dest),
    }
    ways: dict[str, Then] = {
        "async_finish": lambda results: results[-2].current_stream_wait(),
        "return_recv_hook": lambda results: results[-1](),
    }
    steps: dict[str, tuple[Call, Then]] = {
        f"deepep {op}, {way}": (partial(method, **{way: True}), then)
        for way, then in ways.items()
        for op, method in methods.items()
    }

    def pair_of(way: str) -> Call:
        (first, then), (second, _) = (steps[f"deepep {op}, {way}"] for op in ("dispatch", "combine out= zero_copy"))

        def pair() -> None:
            then(first())
            then(second())

        return pair

    calls: dict[str, Call] = {
        "ops dispatch": lambda: ops.ll_dispatch(buffer._seq, x, None, ids, weights, tokens * buffer.num_ranks, config),
        "ops combine": lambda: ops.ll_combine(buffer._seq, rows, out.handle.tensor, None, None, [], *numbers),
        "native dispatch": lambda: nccl_ep.dispatch(x, ids, weights, **how),
        "native combine": lambda: nccl_ep.combine(rows, out.handle),
        "native combine out=": lambda: nccl_ep.combine(rows, out.handle, out=dest),
        **{f"deepep {op}": method for op, method in methods.items()},
        "deepep pair, hooks": pair_of("return_recv_hook"),
        "deepep pair, async_finish": pair_of("async_finish"),
    }  # fmt: skip
    return calls, steps


def high_throughput_calls(buffer: nccl_ep.Buffer, sizes: tuple[int, int, int, int], device: str) -> Calls:
    tokens, hidden, topk, experts = sizes
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.rand(tokens, experts, device=device).topk(topk, -1).indices
    weights = torch.rand(tokens, topk, device=device)
    how: dict[str, Any] = {"buffer": buffer, "num_experts": experts, "mode": "ht", "layout": "flat"}
    out = nccl_ep.dispatch(x, ids, weights, **how)
    rows = buffer.empty(out.x.shape, x.dtype)
    ops, capacity = torch.ops.nccl_ep, out.handle.capacity
    numbers = combine_args(out.handle, 0, x.dtype)
    config = pack_dispatch({"num_experts": experts, "topk": topk, "max_tokens": tokens, "layout": int(LAYOUTS["flat"])})
    view = deep_ep.Buffer.of(buffer)
    per_rank, _, per_expert, is_in_rank, _ = view.get_dispatch_layout(ids, experts)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in_rank}
    worst = tokens * buffer.num_ranks
    normal: dict[str, Any] = {"topk_idx": ids, "topk_weights": weights, **layout}
    sent: Any = view.dispatch(x, **normal)
    recv, handle = sent[0], sent[4]
    earlier, dest = nccl_ep.dispatch_cached(x, out.handle), torch.empty_like(x)

    def whole() -> None:
        per_rank, _, per_expert, is_in_rank, _ = view.get_dispatch_layout(ids, experts)
        made: Any = view.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank,
            topk_idx=ids, topk_weights=weights,
        )  # fmt: skip
        view.combine(made[0], made[4])

    calls: dict[str, Call] = {
        "ops dispatch": lambda: ops.ht_dispatch(buffer._seq, [x], None, ids, weights, capacity, config),
        "ops combine": lambda: ops.ht_combine(
            buffer._seq, rows, None, out.handle.tensor, out.handle.slots, None, None, [], *numbers
        ),
        "native dispatch": lambda: nccl_ep.dispatch(x, ids, weights, **how),
        "native combine": lambda: nccl_ep.combine(rows, out.handle),
        "native dispatch_cached": lambda: nccl_ep.dispatch_cached(x, out.handle),
        "deepep layout": lambda: view.get_dispatch_layout(ids, experts),
        "deepep dispatch": lambda: view.dispatch(x, **normal),
        "deepep dispatch num_worst_tokens": lambda: view.dispatch(x, num_worst_tokens=worst, **normal),
        "deepep dispatch cached": lambda: view.dispatch(x, handle=handle),
        "deepep combine": lambda: view.combine(recv, handle),
        "native dispatch cached out=": lambda: nccl_ep.dispatch_cached(x, out.handle, out=earlier),
        "native combine out=": lambda: nccl_ep.combine(rows, out.handle, out=dest),
        "deepep layout and pair": whole,
    }
    return calls, {}


def arena_bytes_for(sizes: tuple[int, int, int, int], ranks: int) -> int:
    """Room for all outputs that high_throughput_calls has at a time, twice, as each of two streams claims a half."""
    tokens, hidden, _, _ = sizes
    return 2 * 7 * ranks * tokens * 2 * hidden + (128 << 20)


def deepep_like(sizes: tuple[int, int, int, int], ranks: int, kernels: tuple[float, float]) -> Call:
    """An eager pair of DeepEP V1's low-latency mode, as far as the host and the streams see it: five tensors at
    dispatch and one at combine, the stream of communication waiting for the caller's and back, a launch each."""
    tokens, hidden, _, experts = sizes
    local, rows = experts // ranks, ranks * tokens
    comm = _stream(priority=-1)
    cycles = [int(each * torch.cuda.clock_rate()) for each in kernels]  # MHz

    def operation(each: int, tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        current = torch.cuda.current_stream()
        comm.wait_stream(current)
        for shape, dtype in tensors:
            torch.empty(shape, dtype=dtype, device="cuda")
        with torch.cuda.stream(comm):
            _sleep(each)
        current.wait_stream(comm)

    made = [
        ((local, rows, hidden), torch.float8_e4m3fn), ((local, rows), torch.int32), ((local, ranks), torch.int64),
        ((local,), torch.int32), ((local, hidden // 128, rows), torch.float32),
    ]  # fmt: skip

    def pair() -> None:
        operation(cycles[0], made)
        operation(cycles[1], [((tokens, hidden), torch.bfloat16)])

    return pair


def deepep_like_normal(sizes: tuple[int, int, int, int], ranks: int, kernels: tuple[float, float, float]) -> Call:
    """An eager layout, dispatch and combine of DeepEP V1's normal mode, as far as the host and the streams see them.
    kernels: what notifies of counts, dispatch, combine. That of the layout is left out."""
    tokens, hidden, topk, experts = sizes
    rows = ranks * tokens  # at most
    comm = _stream(priority=-1)
    notify, dispatch, combine = (int(each * torch.cuda.clock_rate()) for each in kernels)
    int32, bf16 = torch.int32, torch.bfloat16
    channels = 10

    def operation(
        first: int, tensors: list[tuple[tuple[int, ...], torch.dtype]], second: int | None, waits: bool = False
    ) -> None:
        """Two kernels of so many cycles, and the tensors that are made between them."""
        current = torch.cuda.current_stream()
        comm.wait_stream(current)
        with torch.cuda.stream(comm):
            _sleep(first)
        if waits:
            comm.synchronize()  # DeepEP polls memory of the host
        for shape, dtype in tensors:
            torch.empty(shape, dtype=dtype, device="cuda")
        if second is not None:
            with torch.cuda.stream(comm):
                _sleep(second)
        current.wait_stream(comm)

    layout: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((ranks,), int32), ((experts,), int32), ((tokens, ranks), torch.bool),
    ]  # fmt: skip
    received = [
        ((rows, hidden), bf16), ((rows,), int32), ((rows, topk), torch.int64), ((rows, topk), torch.float32),
        ((ranks, ranks), int32), ((ranks, channels), int32), ((ranks, channels), int32), ((tokens, ranks), int32),
    ]  # fmt: skip

    def pair() -> None:
        operation(0, layout, None)
        operation(notify, received, dispatch, waits=True)
        operation(0, [((tokens, hidden), bf16)], combine)

    return pair


def common_of(sizes: tuple[int, int, int, int], ranks: int, device: str) -> Record:
    """What all records of a run have."""
    tokens, hidden, topk, experts = sizes
    return dict.fromkeys(FIELDS) | {
        "bench": "host", "system": "nccl_ep", "unit": "us", "ranks": ranks, "tokens": tokens, "hidden": hidden,
        "topk": topk, "experts": experts, "num_sms": 0, "date": today(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }  # fmt: skip


def of_call(name: str) -> Record:
    api, _, op = name.partition(" ")
    return {"api": api, "op": op}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--count", type=int, default=50, help="calls of a round")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--mode", choices=("ll", "ht", "both"), default="both")
    parser.add_argument(
        "--deepep-kernels", type=float, nargs=2, default=(27.8, 43.1), metavar=("DISPATCH", "COMBINE"),
        help="us; by default those of two H100s, 128 tokens, FP8 and BF16",
    )  # fmt: skip
    parser.add_argument(
        "--deepep-normal-kernels", type=float, nargs=3, default=(16.0, 353.0, 430.0),
        metavar=("NOTIFY", "DISPATCH", "COMBINE"), help="us; by default those of two H100s, 4096 tokens, BF16",
    )  # fmt: skip
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    group, rank, ranks, barrier = join_torchrun(on_gpu)
    tokens, hidden, topk, experts = LOCAL_SIZES[options.device]
    sizes = (int(options.tokens or tokens), hidden, topk, experts)
    synchronize: Call = torch.cuda.synchronize if on_gpu else (lambda: None)
    records: list[Record] = []
    common = common_of(sizes, ranks, options.device) | {"revision": revision()}

    def note(mode: str, op: str, figure: str, value: float, default: str | None, unit: str = "us") -> None:
        if rank:
            return
        print(f"{mode} {op:44} {figure:6} {value:8.3f} {unit:2}  default device: {default}", flush=True)
        figures = {"figure": figure, "value": round(value, 3), "unit": unit}
        records.append(make(common, **of_call(op), **figures, mode=mode, default_device=default))

    def note_graphs(calls: dict[str, Call]) -> None:
        pairs = [
            ("native dispatch cached out=", "deepep dispatch cached"), ("native combine out=", "deepep combine"),
        ]  # fmt: skip
        told = of_all_ranks(graph_times({op: calls[op] for pair in pairs for op in pair}, barrier, 60))
        values = {op: max(each[op] for each in told) for op in told[0]}
        for native, deepep in pairs:
            note("ht", native, "graph", values[native], None)
            note("ht", deepep, "graph", values[deepep], None)
            note("ht", f"{deepep} / {native}", "ratio", values[deepep] / values[native], None, "x")

    def note_whole(calls: dict[str, Call]) -> None:
        like = deepep_like_normal(sizes, ranks, options.deepep_normal_kernels)
        mine, theirs = (event_time(each, barrier, 200) for each in (calls["deepep layout and pair"], like))
        note("ht", "deepep layout and pair", "event", mine, None)
        note("ht", "deepep_like layout and pair", "event", theirs, None)
        note("ht", "deepep layout and pair / deepep_like", "ratio", mine / theirs, None, "x")

    makers: dict[Mode, Any] = {"ll": low_latency_calls, "ht": high_throughput_calls}
    bare = {"bare launch": launch_nothing, "bare fork and join": fork_and_join()} if on_gpu else {}
    for mode in makers if options.mode == "both" else [options.mode]:
        with nccl_ep.Buffer.for_shapes(
            group, max_tokens=sizes[0], hidden=sizes[1], topk=sizes[2], num_experts=sizes[3], mode=mode,
            device=options.device, arena_bytes=arena_bytes_for(sizes, ranks) if mode == "ht" else None,
        ) as buffer:  # fmt: skip
            calls, steps = makers[mode](buffer, sizes, options.device)
            for default in (None, options.device):
                with default_device(default):
                    once = {**calls, **bare}
                    measures: dict[str, Measure] = {
                        op: partial(host_mean, call, synchronize, options.count) for op, call in once.items()
                    }
                    for op, (call, then) in steps.items():
                        measures[op] = partial(host_means, call, then, synchronize, options.count)
                    for op, us in least(measures, options.rounds).items():
                        note(mode, op, "host", us, default)
                    if on_gpu:
                        pairs = {api: (calls[f"{api} dispatch"], calls[f"{api} combine"]) for api in APIS}
                        for api, (first, second) in {**pairs, "bare": (launch_nothing, launch_nothing)}.items():

                            def pair(first: Call = first, second: Call = second) -> None:
                                first()
                                second()

                            note(mode, f"{api} pair", "event", event_time(pair, barrier, 200), default)
                            note(mode, f"{api} pair", "queued", queued_time(pair, barrier, 200), default)
            if on_gpu and mode == "ll":
                like, alone = (deepep_like(sizes, ranks, each) for each in (options.deepep_kernels, (0.0, 0.0)))
                note(mode, "deepep_like pair", "event", event_time(like, barrier, 200), None)
                note(mode, "deepep_like pair", "queued", queued_time(like, barrier, 200), None)
                floor: dict[str, Measure] = {"deepep_like pair, least": partial(host_mean, alone, synchronize, 50)}
                for op, us in least(floor, options.rounds).items():
                    note(mode, op, "host", us, None)
            if on_gpu and mode == "ht":
                note_graphs(calls)
                note_whole(calls)
    if records:
        save(options.records, records)


if __name__ == "__main__":
    main()
