"""One of two trees of bench/host_in_turns.py, which has its folder run this: python -c TEXT MODE TOKENS DEVICE

Writes the names of calls as a line of JSON. Then reads lines of JSON, [name, warm-up calls, timed calls], and answers
each with how long the host was kept by one of those calls, in us.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import nccl_ep

try:
    from bench import measure_host
except ModuleNotFoundError:  # what it was called before 0.3.0
    from benchmarks import measure_host  # type: ignore[import-not-found, no-redef]


def main() -> None:
    mode: Any
    _, mode, given, device = sys.argv
    _, hidden, topk, experts = measure_host.LOCAL_SIZES[device]
    tokens = int(given)
    sizes = (tokens, hidden, topk, experts)
    maker = measure_host.low_latency_calls if mode == "ll" else measure_host.high_throughput_calls
    with nccl_ep.Buffer.for_shapes(
        None, max_tokens=tokens, hidden=hidden, topk=topk, num_experts=experts, mode=mode, device=device,
        arena_bytes=measure_host.arena_bytes_for(sizes, 1) if mode == "ht" else None,
    ) as buffer:  # fmt: skip
        calls, _ = maker(buffer, sizes, device)
        if device == "cuda":
            calls["bare launch"] = measure_host.launch_nothing
        synchronize: measure_host.Call = torch.cuda.synchronize if device == "cuda" else lambda: None
        print(json.dumps(list(calls)), flush=True)
        for line in sys.stdin:
            name, warm_up, count = json.loads(line)
            measure_host.host_mean(calls[name], synchronize, warm_up)
            (us,) = measure_host.host_mean(calls[name], synchronize, count).values()
            synchronize()
            print(us, flush=True)


if __name__ == "__main__":
    main()
