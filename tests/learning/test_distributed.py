"""Two real processes give the gradients of one process on the joined batch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.learning.distributed_case import CASES, STEPS, batches, model_of, step
from tests.learning.zoo import batch, smooth_net
from wassersmooth import Euclidean, FastGradients, Normalized
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.learning.tikhonov import Tikhonov

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


def run_two_processes(*worker):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", *worker]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one_on_the_joined_batch(tmp_path):
    run_two_processes("tests.learning.distributed_worker", str(tmp_path / "gradients.pt"))
    found = torch.load(tmp_path / "gradients.pt")
    for name, case in CASES.items():
        model = model_of(case)
        tolerance = 1e-6 if "finite" in name else 1e-10
        expected = [step(case, model, images, labels) for images, labels in batches()]
        assert len(expected) == len(found["gradients"][name]) == STEPS
        for received, gradient in zip(found["gradients"][name], expected, strict=True):
            error = float((received - gradient).abs().max() / gradient.abs().max())
            assert error <= tolerance, f"{name}: {error:.2e}"
    assert "static_graph=False" in found["refused"]


def test_fast_gradients_of_two_processes_are_those_of_eager_steps():
    run_two_processes("tests.learning.fast_distributed_worker")


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def sharded_inside(model):
    return torch.nn.Sequential(sharded(model))


def wrapped(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning")
@pytest.mark.parametrize("shard", [sharded, sharded_inside, wrapped])
@pytest.mark.parametrize("objective", [GradientPenalty(Euclidean(), 0.5), Tikhonov(Euclidean(), 0.5)], ids=repr)
def test_fsdp_is_refused_before_torch_fails(shard, objective, group_of_one):
    with pytest.raises(ValueError, match=r"under FSDP are not supported.*DistributedDataParallel"):
        objective(shard(smooth_net()), *batch())


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning")
@pytest.mark.parametrize("shard", [sharded, wrapped])
def test_fsdp_has_no_fast_gradients(shard, group_of_one):
    with pytest.raises(ValueError, match=r"under FSDP are not supported.*DistributedDataParallel"):
        FastGradients(GradientPenalty(Euclidean(), 0.5), shard(smooth_net()))


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, torch.nn.DataParallel])
def test_a_wrapper_inside_another_module_is_told_to_go_around_it(wrapper, group_of_one):
    """The gradients of such a model were not averaged, without a word."""
    objective, model = GradientPenalty(Euclidean(), 0.5), Normalized(wrapper(smooth_net()), [0.5], [0.5])
    with pytest.raises(ValueError, match=rf"got {wrapper.__name__} inside another .* DistributedDataParallel\(ws.Normalized"):
        FastGradients(objective, model)
    FastGradients(objective, DistributedDataParallel(Normalized(smooth_net(), [0.5], [0.5])))


def test_a_name_alone_is_no_fsdp():
    class FSDPlike(torch.nn.Sequential):
        pass

    assert GradientPenalty(Euclidean(), 0.5)(FSDPlike(smooth_net()), *batch()).penalty > 0
