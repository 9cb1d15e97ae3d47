"""One training step of a Mixture-of-Experts layer: forward, backward, optimiser.

python examples/training_layer.py                  2 ranks, as threads, on the CPU
torchrun --nproc-per-node 2 examples/training_layer.py    a process and a GPU each, where there are GPUs
"""

import os

import torch

import nccl_ep
from nccl_ep.testing import run_ranks

TOKENS, HIDDEN, EXPERTS, TOPK = 16, 64, 8, 2


def train(group, device: str = "cpu", steps: int = 20) -> tuple[float, float]:
    """The first and the last loss of this rank."""
    torch.manual_seed(group.rank())
    buffer = nccl_ep.Buffer.for_shapes(
        group, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK, num_experts=EXPERTS, dtype=torch.float32, mode="ht",
        device=device,
    )  # fmt: skip
    local = EXPERTS // group.size()
    router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, device=device)
    experts = torch.nn.Parameter(torch.randn(local, HIDDEN, HIDDEN, device=device) / HIDDEN**0.5)
    optimiser = torch.optim.AdamW([*router.parameters(), experts], lr=0.01)
    x, target = torch.randn(2, TOKENS, HIDDEN, device=device)

    losses = []
    for _ in range(steps):
        weights, idx = router(x).softmax(-1).topk(TOPK)
        out = nccl_ep.dispatch(
            x, idx, weights, buffer=buffer, num_experts=EXPERTS, mode="ht", layout="expert_major",
            capacity=group.size() * TOKENS, zero_padding=True,
        )  # fmt: skip
        y = nccl_ep.combine(torch.bmm(out.x, experts), out.handle)
        loss = (y - target).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    buffer.destroy()
    return losses[0], losses[-1]


def main() -> None:
    if "RANK" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        local_rank = int(os.environ["LOCAL_RANK"])
        device = "cpu"
        if torch.cuda.device_count() > local_rank:
            torch.cuda.set_device(local_rank)
            device = "cuda"
        results = [train(dist.group.WORLD, device)]
    else:
        results = run_ranks(2, train)
    for first, last in results:
        print(f"loss {first:.4f} -> {last:.4f}")
        assert last < first


if __name__ == "__main__":
    main()
