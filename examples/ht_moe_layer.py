"""Forward and backward of an MoE layer of training size, experts spread over ranks, checked against one rank.

    python examples/ht_moe_layer.py [--ranks N] [--device cpu|cuda] [--processes]

No autograd across ranks: dispatch and combine are called by hand, which shows what the backward of each is.

    forward                                     backward
    rows   = dispatch(x)                        grad_rows  = dispatch_cached(grad_y)    rows of grad_y, once an expert
    out    = expert(rows)                       grad_w     = combine_weights(out . grad_rows)
    y      = combine(out), weighted             grad_out   = weight * grad_rows
                                                grad_x     = combine(expert's backward of grad_out), not weighted
"""

import argparse
import itertools
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import nccl_ep
from nccl_ep.testing import run_ranks

MAX_TOKENS, HIDDEN, INNER, TOPK, EXPERTS_PER_RANK, ALIGNMENT = 1024, 256, 128, 4, 4, 16
GRADS = ("x", "weights", "up", "down")


def make_layer(num_ranks):
    """The matrices of each expert, and of each rank the tokens, their experts and weights, and the gradient of y."""
    draw = torch.Generator().manual_seed(0)
    experts = EXPERTS_PER_RANK * num_ranks
    up = torch.randn(experts, HIDDEN, INNER, generator=draw) / HIDDEN**0.5
    down = torch.randn(experts, INNER, HIDDEN, generator=draw) / INNER**0.5
    ranks = []
    for rank in range(num_ranks):
        tokens = MAX_TOKENS - 100 * rank
        x = torch.randn(tokens, HIDDEN, generator=draw).bfloat16()
        scores = torch.randn(tokens, experts, generator=draw) + torch.linspace(1, 0, experts)  # some are busier
        weights, topk_idx = scores.softmax(-1).topk(TOPK)
        grad_y = torch.randn(tokens, HIDDEN, generator=draw).bfloat16()
        ranks.append((x, topk_idx, weights / weights.sum(-1, keepdim=True), grad_y))
    return up, down, ranks


def expert_parts(out):
    """The rows of each local expert in a packed output: a slice of it each, padding included."""
    ends = out.offsets.tolist()
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def forward(x, topk_idx, weights, up, down, buffer):
    """Returns y and what the backward needs. Exact sizes: the tensors hold the rows that came, and zeros as padding."""
    out = nccl_ep.dispatch(
        x, topk_idx, weights, buffer=buffer, num_experts=EXPERTS_PER_RANK * buffer.num_ranks, mode="auto",
        layout="packed", capacity="exact", expert_alignment=ALIGNMENT, zero_padding=True,
    )  # fmt: skip
    hidden = torch.empty(out.x.shape[0], INNER, device=x.device)
    rows = torch.empty_like(out.x)
    for e, part in enumerate(expert_parts(out)):
        hidden[part] = out.x[part].float() @ up[e]
        rows[part] = (torch.nn.functional.silu(hidden[part]) @ down[e]).to(x.dtype)
    y = nccl_ep.combine(rows, out.handle, weights="dispatch")
    return y, (out, hidden, rows)


def backward(grad_y, saved, up, down):
    """Gradients of x [T, H], the weights [T, K], and the local experts' matrices."""
    out, hidden, rows = saved
    moved = nccl_ep.dispatch_cached(grad_y, out.handle, zero_padding=True)
    grad_rows = moved.x.float()
    grad_weights = nccl_ep.combine_weights((rows.float() * grad_rows).sum(-1), out.handle)
    grad_out = out.weights.unsqueeze(-1) * grad_rows
    grad_up, grad_down = torch.zeros_like(up), torch.zeros_like(down)
    grad_in = torch.empty_like(out.x)
    for e, part in enumerate(expert_parts(out)):
        active = torch.nn.functional.silu(hidden[part])
        gate = torch.sigmoid(hidden[part])
        grad_down[e] = active.T @ grad_out[part]
        grad_hidden = (grad_out[part] @ down[e].T) * gate * (1 + hidden[part] * (1 - gate))
        grad_up[e] = out.x[part].float().T @ grad_hidden
        grad_in[part] = (grad_hidden @ up[e].T).to(grad_in.dtype)
    grad_x = nccl_ep.combine(grad_in, out.handle, weights=None)
    return grad_x, grad_weights, grad_up, grad_down


def train_step(group, device):
    """One rank. Twice the same step, to compare the bits."""
    rank, num_ranks = group.rank(), group.size()
    up, down, ranks = make_layer(num_ranks)
    mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    up, down = up[mine].to(device), down[mine].to(device)
    x, topk_idx, weights, grad_y = (tensor.to(device) for tensor in ranks[rank])
    sizes = {"max_tokens": MAX_TOKENS, "hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS_PER_RANK * num_ranks}
    # Room for four outputs, however the tokens choose: they lie there, and their senders write into them.
    arena = 4 * num_ranks * MAX_TOKENS * TOPK * HIDDEN * 2
    with nccl_ep.Buffer.for_shapes(group, **sizes, mode="auto", arena_bytes=arena, device=device) as buffer:
        begin = time.perf_counter()
        y, saved = forward(x, topk_idx, weights, up, down, buffer)
        grads = backward(grad_y, saved, up, down)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        sent = buffer.wire_bytes().get("rows_count", [])
        again, saved_again = forward(x, topk_idx, weights, up, down, buffer)
        grads_again = backward(grad_y, saved_again, up, down)
        buffer.check()
        return {
            "y": y.cpu(),
            **{name: grad.cpu() for name, grad in zip(GRADS, grads, strict=True)},
            "is_same": all(map(torch.equal, (y, *grads), (again, *grads_again))),
            "mode": saved[0].handle.mode,
            "received": saved[0].x.shape[0],
            "seconds": seconds,
            "sent": sum(sent) - sent[rank] if sent else None,
            "stats": buffer.stats(),
        }


def run_process(rank, num_ranks, device, folder):
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    torch.save(train_step(dist.group.WORLD, device), f"{folder}/{rank}")
    dist.destroy_process_group()


def run(num_ranks, device, processes):
    if not processes:
        return run_ranks(num_ranks, lambda group: train_step(group, device))
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_process, (num_ranks, device, folder), nprocs=num_ranks)
        return [torch.load(Path(folder, str(rank))) for rank in range(num_ranks)]


def one_rank_does_all(num_ranks):
    """Plain PyTorch with autograd, in float32: y, and the gradients of x, the weights and the matrices."""
    up, down, ranks = make_layer(num_ranks)
    x, topk_idx, weights, grad_y = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    leaves = [tensor.float().requires_grad_() for tensor in (x, weights, up, down)]
    x, weights, up, down = leaves
    y = torch.zeros_like(x)
    for e in range(len(up)):
        tokens, choices = (topk_idx == e).nonzero(as_tuple=True)
        rows = torch.nn.functional.silu(x[tokens] @ up[e]) @ down[e]
        y = y.index_add(0, tokens, weights[tokens, choices].unsqueeze(-1) * rows)
    return (y.detach(), *torch.autograd.grad(y, leaves, grad_y.float()))


def explain(reports, expected):
    """Says what happened; returns whether it was right."""
    for rank, report in enumerate(reports):
        print(
            f"  rank {rank}: {len(report['y'])} tokens, {report['received']} rows for its experts with padding", end=""
        )
        print("" if report["sent"] is None else f", {report['sent']} rows to and from other ranks")
    stats = reports[0]["stats"]
    in_place = stats["ht_dispatches"] // 3 * 2 - stats["staged_dispatches"]  # a dispatch of exact sizes counts twice
    print(f'mode="auto" took "{reports[0]["mode"]}". Senders wrote rows of {in_place} dispatches to their final place,')
    print(f"{stats['staged_dispatches']} went through the staging rows for want of room in the arena.")
    print("\nAgainst one rank with autograd in float32, largest error and largest value:")
    right = True
    for name, want in zip(("y", *GRADS), expected, strict=True):
        got = torch.cat([report[name] for report in reports]).float()
        error, size = (got - want).abs().max().item(), want.abs().max().item()
        is_close = error < 0.02 * size
        right = right and is_close
        what = name if name == "y" else f"gradient of {name}"
        print(f"  {what:20}{error:10.3g}{size:10.3g}  {'as expected of bf16' if is_close else 'WRONG'}")
    is_same = all(report["is_same"] for report in reports)
    print(f"A second step gave {'the same bits' if is_same else 'DIFFERENT BITS'}.")
    seconds = max(report["seconds"] for report in reports)
    print(f"Forward and backward took {seconds * 1e3:.0f} ms on the slowest rank (CPU ranks share cores).")
    return right and is_same


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--processes", action="store_true", help="ranks as processes instead of threads")
    args = parser.parse_args()
    print(f"An MoE layer on {args.ranks} ranks ({args.device}): {EXPERTS_PER_RANK} experts a rank, top-{TOPK},")
    print(f"up to {MAX_TOKENS} tokens a rank, rows of {HIDDEN} bf16 numbers.")
    torch.set_num_threads(1)  # of each rank
    reports = run(args.ranks, args.device, args.processes)
    return 0 if explain(reports, one_rank_does_all(args.ranks)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
