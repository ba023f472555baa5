"""kill -9 at any moment, then the same command again: the same weights to the last bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.study.small_studies import stripes_file, tiny_run, train_to_the_end
from wassersmooth.study import checkpoints
from wassersmooth.study.runs import Run


def model_bytes(folder: Path) -> dict[str, bytes]:
    stored = checkpoints.load(folder / "model.safetensors").tensors
    return {name: tensor.numpy().tobytes() for name, tensor in stored.items()}


def command(dataset: Path, output: Path, epochs: int) -> list[str]:
    flags = f"--dataset {dataset} --epochs {epochs} --batch-size 8 --validation 0.25 --device cpu --threads 1 --eta-ramp 3"
    regularizer = "wasserstein:eta=0.3,radius=2"
    return [
        sys.executable,
        "-m",
        "wassersmooth",
        "train",
        *flags.split(),
        "--regularizers",
        regularizer,
        "--output",
        str(output),
    ]


@pytest.mark.slow
def test_a_real_command_killed_at_random_moments(tmp_path: Path) -> None:
    dataset, epochs = stripes_file(tmp_path), 40
    whole = subprocess.Popen(command(dataset, tmp_path / "whole", epochs), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    moments = random.Random(0)
    run = tmp_path / "killed" / "wasserstein-eta0.3-radius2-seed0"
    epochs_seen = []
    for _ in range(2):
        started = time.monotonic()
        victim = subprocess.Popen(
            command(dataset, tmp_path / "killed", epochs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        lines = _lines(run)
        while _lines(run) <= lines and victim.poll() is None and time.monotonic() - started < 60:
            time.sleep(0.01)  # until it has started
        time.sleep(moments.uniform(0, 0.3))
        victim.send_signal(signal.SIGKILL)
        victim.wait(timeout=30)
        epochs_seen.append(_lines(run))
    last = subprocess.run(command(dataset, tmp_path / "killed", epochs), capture_output=True, text=True, timeout=120)
    assert last.returncode == 0, last.stderr
    assert whole.wait(timeout=120) == 0
    assert epochs_seen[0] > 0, "nothing was trained before the first kill"
    assert model_bytes(run) == model_bytes(tmp_path / "whole" / run.name)
    assert [row["epoch"] for row in Run.at(run).metrics()] == list(range(1, epochs + 1))


@pytest.mark.slow
def test_many_kills_between_and_inside_writes(tmp_path: Path) -> None:
    """Kill forked children, which start within milliseconds, at many different moments."""
    whole, loaded = tiny_run(tmp_path, epochs=30, batch_size=24, patience=29)
    train_to_the_end(whole, loaded)
    killed = Run(tmp_path / "killed", whole.config)
    moments = random.Random(1)
    kills = 0
    for _ in range(60):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                train_to_the_end(killed, loaded)
            finally:
                os._exit(0)
        time.sleep(moments.uniform(0.001, 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
        if killed.finished:
            break
    train_to_the_end(killed, loaded)
    assert kills >= 3
    assert model_bytes(killed.folder) == model_bytes(whole.folder)
    assert len(killed.metrics()) == 30


def _lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
