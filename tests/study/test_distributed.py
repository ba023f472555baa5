"""torchrun on two processes gives the losses and weights of one, on a network whose layers do not couple images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.study.small_studies import stripes_file
from wassersmooth.study import checkpoints
from wassersmooth.study.distributed import World, choose_device
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run

RUN = "wasserstein-eta0.3-radius2-seed0"


def said(dataset: Path, output: Path, processes: int, more: str, modules: Path | None = None) -> tuple[str, str]:
    """Train on batches of 13: neither they nor the last one can be halved. The system chooses the port."""
    flags = f"train --dataset {dataset} --batch-size 13 --validation 0.25 --device cpu --threads 1 --output {output} {more}"
    begin = [sys.executable, "-m"]
    if processes > 1:
        begin += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command = [*begin, "wassersmooth", *flags.split(), "--regularizers", "wasserstein:eta=0.3,radius=2"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=alone, cwd=modules)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def train(dataset: Path, output: Path, processes: int, more: str = "--epochs 3", modules: Path | None = None) -> str:
    """What is said on the screen."""
    return said(dataset, output, processes, more, modules)[0]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    dataset = stripes_file(tmp_path)
    shown = train(dataset, tmp_path / "two", 2)
    train(dataset, tmp_path / "one", 1)
    one, two = Run.at(tmp_path / "one" / RUN), Run.at(tmp_path / "two" / RUN)
    assert len(one.metrics()) == 3
    for first, second in zip(one.metrics(), two.metrics(), strict=True):
        for key in ("loss", "penalty", "train_error", "validation_error"):
            assert second[key] == pytest.approx(first[key], rel=1e-4, abs=1e-6)
    for name, tensor in checkpoints.load(one.folder / "model.safetensors").tensors.items():
        torch.testing.assert_close(
            checkpoints.load(two.folder / "model.safetensors").tensors[name], tensor, rtol=1e-3, atol=1e-5
        )
    assert shown.count("3/3") == 1, "only the first process speaks"
    assert "already finished" in train(dataset, tmp_path / "two", 2)


DIFFERENT_ERRORS = """
import os
from torch import nn

class Undecided(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, classes))

    def forward(self, images):
        scores = self.inner(images)
        return scores if self.training or os.environ.get("RANK") != "1" else scores * 0

def undecided(channels, classes):
    return Undecided(channels, classes)
"""


@pytest.mark.slow
def test_processes_that_validate_differently_stop_together(tmp_path: Path) -> None:
    """Batch-norm's running statistics can cause this: here the second process never sees an improvement."""
    (tmp_path / "of_two_minds.py").write_text(DIFFERENT_ERRORS)
    more = "--epochs 8 --patience 2 --eta-ramp 0 --learning-rate 0.001 --model of_two_minds:undecided"
    train(stripes_file(tmp_path), tmp_path / "two", 2, more, tmp_path)
    errors = [row["validation_error"] for row in Run.at(tmp_path / "two" / RUN).metrics()]
    assert len(errors) > 3, "the second process alone would have stopped after three epochs"
    assert len(errors) == min(8, errors.index(min(errors)) + 3)


FAST_STEPS = """
import os
import sys
from torch import nn
from wassersmooth.learning.compiled import fast_gradients, prepared_step

def only_traced(graph, on_cuda):
    sys.stdout.write(f"traced in {os.environ['RANK']}\\n")
    return graph

def fail(*_):
    raise RuntimeError("no room here")

prepared_step._compiled = only_traced  # compiling takes long

def small(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 40), nn.SiLU(), nn.Linear(40, classes))

def small_and_alone(channels, classes):
    if os.environ["RANK"] == "1":
        fast_gradients.FastGradients._prepare = fail
    return small(channels, classes)
"""


@pytest.mark.slow
def test_two_processes_take_fast_steps_or_go_on_eagerly_together(tmp_path: Path) -> None:
    """If the fast step failed in one of them alone, the other waited, or added up gradients of different parameters."""
    (tmp_path / "fast_steps.py").write_text(FAST_STEPS)
    dataset, more = stripes_file(tmp_path), "--epochs 2 --batch-size 16 --compile --model fast_steps:"
    shown, warned = said(dataset, tmp_path / "fast", 2, f"{more}small", tmp_path)
    assert "traced in 0" in shown
    assert "traced in 1" in shown
    assert "eager" not in warned
    shown, warned = said(dataset, tmp_path / "eager", 2, f"{more}small_and_alone", tmp_path)
    lines = [line.split("fast one: ")[1] for line in warned.splitlines() if "continues with the eager step" in line]
    assert sorted(lines) == ["another process cannot take it, and says why", "no room here"]
    expected, found = (checkpoints.load(tmp_path / name / RUN / "model.safetensors").tensors for name in ("eager", "fast"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


LAST_THREADS = """
import os
import torch
from wassersmooth.study.distributed import world

with world("cpu") as here:
    model = here.wrap(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    circle = [model]
    circle.append(circle)  # a reference cycle outlives its name
    del model, circle
threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not [name for name in threads if "gloo" in name], threads
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them")
def test_no_thread_of_the_group_outlives_it(tmp_path: Path) -> None:
    """Such a thread can abort the process while Python shuts down, rarely."""
    script = tmp_path / "last_threads.py"
    script.write_text(LAST_THREADS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_the_shards_of_a_batch_add_up_to_its_mean(count: int) -> None:
    images, labels = torch.rand(count, 1, 2, 2), torch.arange(count)
    for size in (1, 2):
        shards = [World(torch.device("cpu"), rank, size).shard(images, labels) for rank in range(size)]
        assert sorted(int(label) for _, mine, _ in shards for label in mine) == list(range(count))
        mean = sum(weight * mine.mean() for mine, _, weight in shards) / size
        torch.testing.assert_close(mean, images.mean())


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(StudyError, match="device must be auto, cpu, cuda or cuda:NUMBER"):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(StudyError, match="sees no GPU; use --device cpu"):
        choose_device("cuda")
