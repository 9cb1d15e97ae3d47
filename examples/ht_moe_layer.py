"""Forward and backward of an MoE layer of training size, experts spread over ranks, checked against one rank.

    python examples/ht_moe_layer.py [--ranks N] [--tokens T] [--hidden H] [--device cpu|cuda] [--processes]

The defaults suit CPU ranks; a layer of a large model on GPUs: --device cuda --tokens 4096 --hidden 7168.
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

INNER, TOPK, EXPERTS_PER_RANK, ALIGNMENT = 128, 4, 4, 16
FEW = 16  # tokens that a rank has in decoding
GRADS = ("x", "weights", "up", "down")


def make_layer(args):
    """The matrices of each expert, and of each rank the tokens, their experts and weights, and the gradient of y."""
    draw = torch.Generator().manual_seed(0)
    experts = EXPERTS_PER_RANK * args.ranks
    up = torch.randn(experts, args.hidden, INNER, generator=draw) / args.hidden**0.5
    down = torch.randn(experts, INNER, args.hidden, generator=draw) / INNER**0.5
    ranks = []
    for rank in range(args.ranks):
        tokens = args.tokens - args.tokens * rank // (2 * args.ranks)  # some have fewer
        x = torch.randn(tokens, args.hidden, generator=draw).bfloat16()
        scores = torch.randn(tokens, experts, generator=draw) + torch.linspace(1, 0, experts)  # some are busier
        weights, topk_idx = scores.softmax(-1).topk(TOPK)
        grad_y = torch.randn(tokens, args.hidden, generator=draw).bfloat16()
        ranks.append((x, topk_idx, weights / weights.sum(-1, keepdim=True), grad_y))
    return up, down, ranks


def most_rows(num_ranks, tokens):
    """Of an output, with padding, however the tokens choose."""
    return num_ranks * tokens * TOPK + EXPERTS_PER_RANK * ALIGNMENT


def expert_parts(out):
    """The rows of each local expert in a packed output: a slice of it each, padding included."""
    ends = out.offsets.tolist()
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def forward(x, topk_idx, weights, up, down, buffer, capacity="exact", max_tokens=None):
    """Returns y and what the backward needs. Exact sizes: the tensors hold the rows that came, and zeros as padding."""
    out = nccl_ep.dispatch(
        x, topk_idx, weights, buffer=buffer, num_experts=EXPERTS_PER_RANK * buffer.num_ranks, mode="auto",
        layout="packed", capacity=capacity, max_tokens=max_tokens, expert_alignment=ALIGNMENT, zero_padding=True,
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


def now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train_step(group, args):
    """One rank. Twice the same step, to time it and to compare the bits; then forward alone, for other sizes."""
    rank, num_ranks, device = group.rank(), group.size(), args.device
    up, down, ranks = make_layer(args)
    mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
    up, down = up[mine].to(device), down[mine].to(device)
    x, topk_idx, weights, grad_y = (tensor.to(device) for tensor in ranks[rank])
    experts = EXPERTS_PER_RANK * num_ranks
    sizes = {"max_tokens": args.tokens, "hidden": args.hidden, "topk": TOPK, "num_experts": experts}
    # Room for four outputs, however the tokens choose: they lie there, and their senders write into them.
    arena = 4 * most_rows(num_ranks, args.tokens) * args.hidden * 2
    with nccl_ep.Buffer.for_shapes(group, **sizes, mode="auto", arena_bytes=arena, device=device) as buffer:
        y, saved = forward(x, topk_idx, weights, up, down, buffer)
        grads = backward(grad_y, saved, up, down)
        sent = buffer.wire_bytes().get("rows_count", [])
        begin = now(device)
        again, saved_again = forward(x, topk_idx, weights, up, down, buffer)
        grads_again = backward(grad_y, saved_again, up, down)
        seconds, stats = now(device) - begin, buffer.stats()
        known = [forward_of(tokens, x, topk_idx, weights, up, down, buffer) for tokens in (FEW, args.tokens)]
        buffer.check()
        return {
            "y": y.cpu(),
            **{name: grad.cpu() for name, grad in zip(GRADS, grads, strict=True)},
            "is_same": all(map(torch.equal, (y, *grads), (again, *grads_again))),
            "mode": saved[0].handle.mode,
            "received": saved[0].x.shape[0],
            "known": [(tokens, mode, (some - y[: len(some)]).abs().max().item()) for tokens, mode, some in known],
            "seconds": seconds,
            "sent": sum(sent) - sent[rank] if sent else None,
            "stats": stats,
        }


def forward_of(tokens, x, topk_idx, weights, up, down, buffer):
    """The first tokens alone, in tensors with room for whatever comes: mode="auto" then goes by the sizes."""
    tokens = min(tokens, buffer.max_tokens)
    room = most_rows(buffer.num_ranks, tokens)
    y, (out, *_) = forward(x[:tokens], topk_idx[:tokens], weights[:tokens], up, down, buffer, room, tokens)
    return tokens, out.handle.mode, y


def run_process(rank, args, folder):
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    torch.save(train_step(dist.group.WORLD, args), f"{folder}/{rank}")
    dist.destroy_process_group()


def run(args):
    if not args.processes and (args.device == "cpu" or args.ranks == 1):
        return run_ranks(args.ranks, lambda group: train_step(group, args))
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_process, (args, folder), nprocs=args.ranks)
        return [torch.load(Path(folder, str(rank))) for rank in range(args.ranks)]


def one_rank_does_all(args):
    """Plain PyTorch with autograd, in float32: y, and the gradients of x, the weights and the matrices."""
    up, down, ranks = make_layer(args)
    x, topk_idx, weights, grad_y = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    topk_idx, grad_y = topk_idx.to(args.device), grad_y.to(args.device)
    leaves = [tensor.float().to(args.device).requires_grad_() for tensor in (x, weights, up, down)]
    x, weights, up, down = leaves
    y = torch.zeros_like(x)
    for e in range(len(up)):
        tokens, choices = (topk_idx == e).nonzero(as_tuple=True)
        rows = torch.nn.functional.silu(x[tokens] @ up[e]) @ down[e]
        y = y.index_add(0, tokens, weights[tokens, choices].unsqueeze(-1) * rows)
    return [tensor.detach().cpu() for tensor in (y, *torch.autograd.grad(y, leaves, grad_y.float()))]


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
    print("\nForward alone, with a capacity for all that can come instead of exact sizes:")
    for calls in zip(*(report["known"] for report in reports), strict=True):
        tokens, mode, _ = calls[0]
        is_close = max(error for *_, error in calls) < 0.02 * expected[0].abs().max().item()
        right = right and is_close
        print(f'  up to {tokens} tokens a rank: mode="auto" took "{mode}", y is {"as above" if is_close else "WRONG"}')
    seconds = max(report["seconds"] for report in reports)
    print(f"\nForward and backward took {seconds * 1e3:.0f} ms on the slowest rank (CPU ranks share cores).")
    return right and is_same


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank, at most")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--processes", action="store_true", help="CPU ranks as processes instead of threads")
    args = parser.parse_args()
    for name in ("ranks", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, must be 1 or more")
    if args.hidden < 8 or args.hidden % 8:
        parser.error(f"--hidden is {args.hidden}, must be a multiple of 8: bf16 rows are multiples of 16 bytes")
    print(f"An MoE layer on {args.ranks} ranks ({args.device}): {EXPERTS_PER_RANK} experts a rank, top-{TOPK},")
    print(f"up to {args.tokens} tokens a rank, rows of {args.hidden} bf16 numbers.")
    torch.set_num_threads(1)  # of each rank
    return 0 if explain(run(args), one_rank_does_all(args)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
