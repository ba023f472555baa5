"""Run by torchrun in two processes: fast gradients of a model in DistributedDataParallel, beside those of eager steps.

Each process compares its own; an error of either fails the test that started it (test_distributed.py).
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tests.learning.steps import assert_same_step
from tests.learning.test_recipes import recipe
from tests.learning.zoo import batch, make
from wassersmooth import Euclidean, FastGradients
from wassersmooth.learning.objectives import GradientPenalty

OBJECTIVE = GradientPenalty(Euclidean(), 0.5)
SETTINGS = {"compile": False}


def pair(name):
    """A model and its twin, each in a wrapper of its own, with the weights of rank 0."""
    model = make(name)
    return DistributedDataParallel(copy.deepcopy(model)), DistributedDataParallel(model)


def part(size, seed):
    """Another one in each process."""
    return batch(size, seed=10 * seed + dist.get_rank())


def eager(model, *batches, accumulated=False):
    if not accumulated:
        model.zero_grad()
    for images, labels in batches:
        terms = OBJECTIVE(model, images, labels)
        terms.total.backward()
    return [term.detach() for term in terms]


def descend(*models):
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad


def train(name):
    """A few steps: gradients are averaged, and buffers are those of rank 0 at the beginning of each."""
    model, twin = pair(name)
    fast = FastGradients(OBJECTIVE, model, **SETTINGS)
    for seed in range(4):
        images, labels = part(4, seed)
        assert_same_step(fast(images, labels), eager(twin, (images, labels)), model, twin, 1e-10)
        descend(model, twin)


def accumulate():
    """Inside no_sync nothing is averaged; the next step averages the sum. Afterwards also on top of averaged gradients."""
    model, twin = pair("batch_norm_train")
    fast = FastGradients(OBJECTIVE, model, **SETTINGS)
    first, second, third = (part(4, seed) for seed in range(3))
    with model.no_sync(), twin.no_sync():
        assert_same_step(fast(*first), eager(twin, first), model, twin, 1e-10)
    gradients = [[parameter.grad.clone() for parameter in model.parameters()]] * 2
    dist.all_gather_object(gradients, gradients[0])
    assert not all(one.equal(other) for one, other in zip(*gradients, strict=True))
    for given in (second, third):
        received = fast(*given, accumulate=True)
        assert_same_step(received, eager(twin, given, accumulated=True), model, twin, 1e-10)


def shapes():
    """One process has prepared the shape of its batch and the other takes an eager step: both average in the same way."""
    model, twin = pair("group_norm")
    fast = FastGradients(OBJECTIVE, model, **SETTINGS)
    for step in range(3):
        images, labels = part(4 + step * dist.get_rank(), step)
        assert_same_step(fast(images, labels), eager(twin, (images, labels)), model, twin, 1e-10)


def buckets():
    """Several of them give the same means."""
    from wassersmooth.learning.compiled import data_parallel

    data_parallel.BUCKET, usual = 256, data_parallel.BUCKET
    train("residual_train")
    data_parallel.BUCKET = usual


def follow_the_recipe():
    """Of docs/learning.md: after steps on different batches all processes have the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double()
    recipe("distributed_steps")(model, [part(4, seed) for seed in range(2)])
    weights = [torch.zeros_like(model[1].weight) for _ in range(2)]
    dist.all_gather(weights, model[1].weight.detach())
    assert weights[0].equal(weights[1])


def refused(model, message):
    with pytest.raises(ValueError, match=message):
        FastGradients(OBJECTIVE, model, **SETTINGS)(*part(4, 0))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("group_norm", "batch_norm_train"):
        train(name)
    accumulate()
    shapes()
    buckets()
    follow_the_recipe()
    hooked = DistributedDataParallel(make("group_norm"))
    hooked.register_comm_hook(None, fp16_compress_hook)
    refused(hooked, "communication hooks")
    built_in = DistributedDataParallel(make("group_norm"))
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    refused(built_in, "communication hooks")
    synced = nn.Sequential(make("group_norm"), nn.SyncBatchNorm(3).double())
    refused(_wrap_on_cpu(synced), "SyncBatchNorm has no second derivative across processes")
    dist.barrier()
    dist.destroy_process_group()


def _wrap_on_cpu(model):
    """Torch refuses a SyncBatchNorm on a CPU when it is wrapped, so it is put in afterwards."""
    wrapped = DistributedDataParallel(nn.Sequential(model[0], nn.Linear(3, 3).double()))
    wrapped.module[1] = model[1]
    return wrapped


if __name__ == "__main__":
    main()
