"""Gradients of several processes, averaged as :class:`~torch.nn.parallel.DistributedDataParallel` does in its backward pass.

There is no backward pass here: every process has all its gradients at once, and then they are averaged in buckets. ``no_sync``
of the wrapper is honored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth._torch_internals import ddp_hooks, foreach_copy

BUCKET = 25 * 2**20  # bytes that are reduced at once, as in torch


def check(model: DistributedDataParallel) -> None:
    """Raise ValueError for settings that change how gradients are computed or averaged."""
    if ddp_hooks(model):
        raise ValueError(
            "fast gradients are averaged without the backward pass that communication hooks belong to; got a model in "
            "DistributedDataParallel with such a hook; leave it out, or call the objective"
        )
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            "SyncBatchNorm has no second derivative across processes; got one in the model; use BatchNorm, with the "
            "statistics of each process's own part"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "fast gradients bypass the mixed precision of DistributedDataParallel; got mixed_precision; use torch.autocast"
        )


def average_gradients(model: DistributedDataParallel) -> None:
    """Replace every gradient by its mean over the processes, unless inside ``model.no_sync()``.

    All processes must have gradients of the same parameters, which is what the wrapper asks for, too.
    """
    if not model.require_backward_grad_sync:
        return
    named = ((name, parameter.grad) for name, parameter in model.module.named_parameters() if parameter.requires_grad)
    gradients = [gradient for name, gradient in named if gradient is not None and name not in model.parameters_to_ignore]
    pending = []
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat.div_(dist.get_world_size(model.process_group))
        pending.append((bucket, flat, dist.all_reduce(flat, group=model.process_group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        foreach_copy(bucket, [part.view(gradient.shape) for part, gradient in zip(parts, bucket, strict=True)])


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split into lists of one dtype and device and a limited size, in the same order in all processes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for group in kinds.values():
        bucket: list[Tensor] = []
        for gradient in group:
            if bucket and sum(one.nbytes for one in bucket) + gradient.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket
