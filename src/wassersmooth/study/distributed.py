"""Training with several processes: `torchrun -m wassersmooth train ...`. Each takes its part of a batch; rank 0 writes.

Losses and weights are those of a single process unless a layer couples the images of a batch, as batch-norm does.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks
from wassersmooth.study.errors import StudyError


@dataclass(frozen=True)
class World:
    """This process, one of ``size``."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to call in a training step, whose gradients are averaged over the processes."""
        if self.size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)  # static_graph stays off: it is silently wrong for penalties

    def shard(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
        """This process's part of a batch, and the weight that makes the mean over processes the mean over the batch."""
        if self.size == 1:
            return images, labels, 1.0
        mine = slice(self.rank, None, self.size)
        return images[mine], labels[mine], len(labels[mine]) * self.size / len(labels)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes. # shape: as values"""
        if self.size > 1:
            dist.all_reduce(values)
            values = values / self.size
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """The values of rank 0, so that all processes decide alike. # shape: as values"""
        if self.size > 1:
            dist.broadcast(values, 0)
        return values

    def broadcast_bytes(self, content: bytes | None) -> bytes | None:
        """The bytes of rank 0, the only process that needs to see the disk."""
        contents = [content]
        if self.size > 1:
            dist.broadcast_object_list(contents, 0, device=self.device)
        return contents[0]


@contextmanager
def world(device: str) -> Iterator[World]:
    """This process as torchrun started it, or a world of one process without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else None)
    if size == 1:
        yield World(chosen)
        return
    # DDP imports this module. If that happens after the group is made, its default arguments keep the group alive, and a thread
    # of the group that releases a tensor while Python shuts down aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(chosen, dist.get_rank(), size)
    finally:
        gc.collect()  # models wrapped in DDP hold the group too
        dist.destroy_process_group()


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device that a name stands for; "auto" is CUDA if available. Under torchrun each process has its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StudyError(f"device must be auto, cpu, cuda or cuda:NUMBER; got {name!r}") from None
    if device.type in _checks.WITHOUT_FLOAT64:
        raise StudyError(f"device must be auto, cpu, cuda or cuda:NUMBER; got {name}, which has no float64; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise StudyError(f"device must be auto, cpu, cuda or cuda:NUMBER; got {name!r}")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if not count:
        raise StudyError(f"device {name}: torch {torch.__version__} sees no GPU; use --device cpu, or a CUDA build of torch")
    index = device.index if local_rank is None else local_rank
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device.index >= count:
        raise StudyError(f"device {device}: there are {count} GPUs, counted from 0")
    torch.cuda.set_device(device)
    return device
