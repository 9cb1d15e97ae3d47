"""Two-level gradient averaging (A2SGD) as a communication hook of DistributedDataParallel.

A rank sends two numbers for each bucket of gradients: the mean of the entries that are not negative, and the mean of
those that are. What the two means do not say, the rank keeps as its own error. Its new gradient is that error plus the
means over all ranks:

    g = error + own means at their places;    g' = error + mean over the ranks of the means, at the same places

So 8 bytes a bucket travel instead of all gradients. The price: ranks take different steps, since each keeps its error,
and their copies of the parameters drift apart. ``average_parameters`` brings them together; train.py calls it every
--a2sgd-average steps and before a checkpoint.
"""

# Annotations are objects here, not text: DistributedDataParallel looks at those of a hook.
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def two_means(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [2]: the mean of the entries >= 0 and of those < 0 (0 where there is none); bool: which are >= 0."""
    is_positive = gradient >= 0
    wide = gradient.float()
    positive, negative = torch.where(is_positive, wide, 0.0).sum(), torch.where(is_positive, 0.0, wide).sum()
    count = is_positive.sum()
    means = torch.stack([positive / count.clamp(min=1), negative / (gradient.numel() - count).clamp(min=1)])
    return means, is_positive


def rebuild(gradient: Tensor, is_positive: Tensor, own: Tensor, averaged: Tensor) -> Tensor:
    """The gradient with its own means replaced by those of all ranks."""
    change = averaged - own
    return (gradient.float() + torch.where(is_positive, change[0], change[1])).to(gradient.dtype)


@dataclass
class Traffic:
    """Bytes that a rank has given to all-reduces, and those that plain averaging would have given."""

    group: Any = None
    sent: int = 0
    plain: int = 0


def a2sgd_hook(traffic: Traffic, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """``ddp.register_comm_hook(Traffic(), a2sgd_hook)``."""
    gradient = bucket.buffer()
    own, is_positive = two_means(gradient)
    averaged = own / dist.get_world_size(traffic.group)
    traffic.sent += averaged.nbytes
    traffic.plain += gradient.nbytes
    work = dist.all_reduce(averaged, group=traffic.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: rebuild(gradient, is_positive, own, averaged))


def counted_average_hook(traffic: Traffic, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DistributedDataParallel does without a hook, with the bytes counted."""
    gradient = bucket.buffer().div_(dist.get_world_size(traffic.group))
    traffic.sent += gradient.nbytes
    traffic.plain += gradient.nbytes
    work = dist.all_reduce(gradient, group=traffic.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


@torch.no_grad()
def average_parameters(parameters: Iterable[Tensor], group: Any = None) -> None:
    size = dist.get_world_size(group)
    for parameter in parameters:
        dist.all_reduce(parameter.data, group=group)
        parameter.data.div_(size)
