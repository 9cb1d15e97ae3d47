"""A decode step of a small MoE layer with its experts spread over ranks, checked against one rank that does it all.

    python examples/ll_moe_layer.py [--ranks N] [--device cpu|cuda] [--processes]

Ranks are threads, or processes (on GPUs, or when asked for). All know the seed, hence everybody's tokens and weights.
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.testing import run_ranks

MAX_TOKENS, HIDDEN, INNER, TOPK, EXPERTS_PER_RANK, STEPS = 64, 512, 256, 4, 4, 20


def make_layer(num_ranks):
    """The router, the two matrices of each expert, and the tokens of each rank: 64, 32, 16, 8, .. 0."""
    draw = torch.Generator().manual_seed(0)
    experts = EXPERTS_PER_RANK * num_ranks
    router = torch.randn(HIDDEN, experts, generator=draw) / HIDDEN**0.5
    up = (torch.randn(experts, HIDDEN, INNER, generator=draw) / HIDDEN**0.5).bfloat16()
    down = (torch.randn(experts, INNER, HIDDEN, generator=draw) / INNER**0.5).bfloat16()
    return router, up, down, [torch.randn(MAX_TOKENS >> r, HIDDEN, generator=draw).bfloat16() for r in range(num_ranks)]


def route(x, router):
    weights, topk_idx = (x.float() @ router).softmax(-1).topk(TOPK)
    return topk_idx, weights / weights.sum(-1, keepdim=True)


def experts(rows, up, down):
    """rows [experts, C, H], unused ones too: the host never asks how many came, so a CUDA graph could hold this.

    In the dtype of the matrices: float32 on the CPU, whose products of bf16 matrices take many times as long.
    """
    return torch.bmm(torch.nn.functional.silu(torch.bmm(rows.to(up.dtype), up)), down).to(rows.dtype)


def now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def decode(group, device):
    """One rank. Runs the same step several times, to time it and to compare the bits."""
    rank, num_ranks = group.rank(), group.size()
    num_experts = num_ranks * EXPERTS_PER_RANK
    router, up, down, tokens = make_layer(num_ranks)
    x, (topk_idx, weights) = tokens[rank].to(device), (t.to(device) for t in route(tokens[rank], router))
    mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    compute = torch.float32 if device == "cpu" else torch.bfloat16
    up, down = (matrices[mine].to(device, compute) for matrices in (up, down))
    shapes = {"max_tokens": MAX_TOKENS, "hidden": HIDDEN, "topk": TOPK, "num_experts": num_experts}
    with nccl_ep.Buffer.for_shapes(group, **shapes, device=device) as buffer:
        if rank == 0:
            print(f"The ranks have met. Each runs {STEPS} steps of dispatch, experts, combine ..", flush=True)
        results, spans = [], []
        for _ in range(STEPS):
            begin = now(device)
            out = nccl_ep.dispatch(x, topk_idx, weights, buffer=buffer, num_experts=num_experts)
            dispatched = now(device)
            rows = experts(out.x, up, down)
            computed = now(device)
            results.append(nccl_ep.combine(rows, out.handle))
            spans.append((dispatched - begin, computed - dispatched, now(device) - computed))
        buffer.check()
        return {
            "y": results[0].cpu(),
            "is_same_every_time": all(torch.equal(results[0], y) for y in results),
            "times": torch.tensor(spans).median(0).values * 1e6,
            "rows_sent": [int((topk_idx // EXPERTS_PER_RANK == r).any(1).sum()) for r in range(num_ranks)],
            "choices": [int((topk_idx // EXPERTS_PER_RANK == r).sum()) for r in range(num_ranks)],
            "expert_rows": out.counts.tolist(),
            "rows_counted": buffer.wire_bytes()["rows_count"],  # by the CPU's transport, both ways; empty on GPUs
        }


def run_process(rank, num_ranks, device, folder):
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    torch.save(decode(dist.group.WORLD, device), f"{folder}/{rank}")
    dist.destroy_process_group()


def run(num_ranks, device, processes):
    if not processes:
        return run_ranks(num_ranks, lambda group: decode(group, device))
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_process, (num_ranks, device, folder), nprocs=num_ranks)
        return [torch.load(Path(folder, str(rank))) for rank in range(num_ranks)]


def one_rank_does_all(num_ranks):
    """Plain PyTorch in float32: no ranks, no wire, every expert in one place."""
    router, up, down, tokens = make_layer(num_ranks)
    topk_idx, weights = route(torch.cat(tokens), router)
    x = torch.cat(tokens).float().expand(len(up), -1, -1)
    every = experts(x, up.float(), down.float())  # [experts, tokens, H]
    chosen = every[topk_idx, torch.arange(len(topk_idx))[:, None]]  # [tokens, K, H]
    return (weights[..., None] * chosen).sum(1)


def explain(reports, expected):
    """Says what happened; returns whether it was right."""
    ranks = range(len(reports))
    print("\nRows sent by dispatch. A token goes once to each rank that has experts of it, however many they are.")
    print("          tokens" + "".join(f"   to rank {r}" for r in ranks))
    for r, report in enumerate(reports):
        print(f"  rank {r:<3}{len(report['y']):7}" + "".join(f"{count:12}" for count in report["rows_sent"]))
    remote = [(r, peer) for r in ranks for peer in ranks if r != peer]
    rows, choices = (sum(reports[r][key][peer] for r, peer in remote) for key in ("rows_sent", "choices"))
    print(f"{rows} rows crossed between ranks for {choices} choices of another rank's expert;")
    print("combine sent as many back: each rank adds up its own experts' rows of a token first.")
    right = True
    if all(report["rows_counted"] for report in reports):
        steps = [[(reports[r]["rows_sent"][p] + reports[p]["rows_sent"][r]) * STEPS for p in ranks] for r in ranks]
        right = steps == [report["rows_counted"] for report in reports]
        print(f"The transport counted {'the same' if right else 'OTHER NUMBERS'}.")

    print("\nRows that each expert received:")
    for r, report in enumerate(reports):
        print(f"  rank {r:<3}" + "".join(f"{count:6}" for count in report["expert_rows"]))

    error, size = (torch.cat([r["y"] for r in reports]) - expected).abs().max().item(), expected.abs().max().item()
    is_close, is_same = error < 0.02 * size, all(report["is_same_every_time"] for report in reports)
    print(
        f"\nAgainst one rank that computes everything in float32: the largest error is {error:.2g}, the largest value"
    )
    print(f"{size:.2g}: {'as expected of bf16' if is_close else 'WRONG'}.")
    print(f"{STEPS} runs of the step gave {'the same bits every time' if is_same else 'DIFFERENT BITS'}.")
    times = torch.stack([report["times"] for report in reports]).max(0).values.tolist()
    print(
        "Median time on the slowest rank, waiting for the others included (CPU ranks share cores: no hint of a GPU's):"
    )
    print("dispatch {:.0f} us, experts {:.0f} us, combine {:.0f} us.".format(*times))
    return right and is_close and is_same


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    num_gpus = torch.cuda.device_count() if nccl_ep._C.has_cuda() else 0
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if num_gpus else "cpu")
    parser.add_argument("--ranks", type=int, help="default: 4, or one a GPU")
    parser.add_argument("--processes", action="store_true", help="CPU ranks as processes instead of threads")
    args = parser.parse_args()
    if args.device == "cuda" and num_gpus == 0:
        parser.error("--device is cuda: " + ("torch finds no GPU" if nccl_ep._C.has_cuda() else "nccl_ep has no CUDA"))
    num_ranks = (num_gpus if args.device == "cuda" else 4) if args.ranks is None else args.ranks
    if num_ranks < 1:
        parser.error(f"--ranks is {num_ranks}, must be 1 or more")
    # Fewer GPUs than ranks: only a world on one GPU is possible, in builds with NCCL_EP_LAB. Its ranks are threads.
    processes = args.processes or (args.device == "cuda" and 1 < num_ranks <= num_gpus)
    print(f"One MoE layer on {num_ranks} ranks ({'processes' if processes else 'threads'}, {args.device}):", end=" ")
    print(f"{EXPERTS_PER_RANK} experts a rank, top-{TOPK}, rows of {HIDDEN} bf16 numbers.", flush=True)
    torch.set_num_threads(1)  # of each rank
    reports = run(num_ranks, args.device, processes)
    print("Done. One rank computes the same without the library, in float32 ..", flush=True)
    return 0 if explain(reports, one_rank_does_all(num_ranks)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
