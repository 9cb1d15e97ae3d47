"""Dispatch and combine over the nodes that torchrun started, checked on every rank: see examples/two_nodes.sh.

torchrun ... examples/two_nodes.py [--device cpu|cuda] [--mode ll|ht] [--tokens N] [--hidden H] [--steps N]

Expert e multiplies its rows by a number of its own, so that each rank can tell what must come back.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

import nccl_ep

TOPK, EXPERTS_PER_RANK = 4, 2


def factor(expert):
    """Powers of two: products of bf16 numbers are exact."""
    return 2.0 ** (expert % 5 - 2)


def step(x, topk_idx, weights, buffer, num_experts, mode):
    out = nccl_ep.dispatch(
        x, topk_idx, weights, buffer=buffer, num_experts=num_experts, layout="flat", mode=mode,
        capacity="exact" if mode == "ht" else None,
    )  # fmt: skip
    count = int(out.total)  # rows behind it are of no token
    mine = torch.arange(EXPERTS_PER_RANK, device=x.device) + EXPERTS_PER_RANK * buffer.rank
    scale = torch.where(out.topk_idx >= 0, out.weights * factor(mine)[out.topk_idx.clamp(min=0)], 0.0).sum(-1)
    rows = torch.zeros_like(out.x)
    rows[:count] = (out.x[:count].float() * scale[:count, None]).to(x.dtype)
    return nccl_ep.combine(rows, out.handle)


def run(options):
    rank, world = dist.get_rank(), dist.get_world_size()
    a_node = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    num_experts = world * EXPERTS_PER_RANK
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(options.tokens, options.hidden, generator=draw).bfloat16()
    topk_idx = torch.rand(options.tokens, num_experts, generator=draw).topk(TOPK).indices
    weights = torch.rand(options.tokens, TOPK, generator=draw)
    want = x.float() * (weights * factor(topk_idx)).sum(-1, keepdim=True)
    x, topk_idx, weights = x.to(device), topk_idx.to(device), weights.to(device)
    times = []
    with nccl_ep.Buffer.for_shapes(
        dist.group.WORLD, max_tokens=options.tokens, hidden=options.hidden, topk=TOPK, num_experts=num_experts,
        mode=options.mode, domain_size=a_node, device=device,
    ) as buffer:  # fmt: skip
        for _ in range(options.steps):
            begin = time.perf_counter()
            y = step(x, topk_idx, weights, buffer, num_experts, options.mode)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        buffer.check()
        wrong = float((y.cpu().float() - want).abs().max() / want.abs().max())
    owners = topk_idx.cpu() // EXPERTS_PER_RANK // a_node
    abroad = sum(len({node for node in each if node != rank // a_node}) for each in owners.tolist())
    return {"rank": rank, "node": rank // a_node, "error": wrong, "rows": abroad, "ms": statistics.median(times) * 1e3}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--mode", choices=("ll", "ht"), default="ll")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts this program on every node: see examples/two_nodes.sh")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # ranks meet over it; rows go by NVLink and the NICs
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, run(options))
    is_right = all(report["error"] < 0.02 for report in reports)  # bf16 has 8 bits
    if dist.get_rank() == 0:
        for report in reports:
            print("node {node} rank {rank}: {rows} rows to other nodes, largest error {error:.1e}, {ms:.2f} ms a step"
                  .format(**report))  # fmt: skip
        nodes = len({report["node"] for report in reports})
        print(f"{len(reports)} ranks on {nodes} nodes, {options.mode}: {'right' if is_right else 'WRONG'}")
    dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
