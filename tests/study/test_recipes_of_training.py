"""Label smoothing, averaged weights and frozen batch-norm: what they do, and that a killed run resumes bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.study.small_studies import CPU, tiny_run, tiny_study, train_to_the_end
from wassersmooth.study import checkpoints
from wassersmooth.study.config import RunConfig
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run
from wassersmooth.study.training import TrainingState

EVERYTHING = {"label_smoothing": 0.1, "average_weights": 0.9, "freeze_norm_after": 2}
ROUGH = {"model": "resnet20", "train_images": 24, "batch_size": 12}  # the small network has no batch-norm


class KilledError(Exception):
    """Stands for the end of a process."""


def weights(run: Run) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in checkpoints.load(run.folder / "model.safetensors").tensors.items()}


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("epochs_before", [1, 2, 3])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs_before: int) -> None:
    changes = {**EVERYTHING, **ROUGH, "regularizers": ("dual-norm+displaced:eta=0.1,epsilon=0.05",), "epochs": 4}
    whole, loaded = tiny_run(tmp_path, **changes)
    train_to_the_end(whole, loaded)
    killed = Run(tmp_path / "killed", whole.config)
    save = TrainingState.save

    def save_and_die(state: TrainingState, run: Run) -> None:
        save(state, run)
        if state.epoch == epochs_before:
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(TrainingState, "save", save_and_die)
        with pytest.raises(KilledError):
            train_to_the_end(killed, loaded)
    train_to_the_end(killed, loaded)
    assert weights(killed) == weights(whole)
    times = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in times} for row in killed.metrics()] == [
        {k: v for k, v in row.items() if k not in times} for row in whole.metrics()
    ]


def test_the_average_is_that_of_all_steps(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, average_weights=0.5)
    state = TrainingState(run.config, loaded, CPU)
    expected = copy.deepcopy(next(state.model.parameters()).data)
    for step in range(1, 20):
        state.steps = step
        with torch.no_grad():
            next(state.model.parameters()).add_(1.0)
        state.average()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * next(state.model.parameters()).data
    torch.testing.assert_close(next(state.result.parameters()).data, expected)
    assert state.result is not state.model


def test_what_is_kept_is_the_average(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, average_weights=0.9, patience=3)
    train_to_the_end(run, loaded)
    plain, _ = tiny_run(tmp_path / "study", patience=3)
    train_to_the_end(plain, loaded)
    assert weights(run) != weights(plain)
    state = TrainingState(run.config, loaded, CPU)
    state.resume(run)
    state.restore_best()
    kept = checkpoints.load(run.folder / "model.safetensors").tensors
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state.result.state_dict().items())
    assert not all(torch.equal(tensor, kept[name]) for name, tensor in state.model.state_dict().items())


def test_frozen_statistics_stay_and_weights_move(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, **ROUGH, freeze_norm_after=1, epochs=1)
    state = TrainingState(run.config, loaded, CPU)
    state.begin_epoch()
    assert all(module.training for module in norms(state.model))
    state.end_epoch(None)
    state.begin_epoch()
    assert [module.training for module in norms(state.model)] == [False] * 19
    means, weight = [m.running_mean.clone() for m in norms(state.model)], norms(state.model)[0].weight.detach().clone()  # type: ignore[union-attr]
    state.build_step()(loaded.train.images[:8], loaded.train.labels[:8], 1.0)
    assert all(torch.equal(m.running_mean, mean) for m, mean in zip(norms(state.model), means, strict=True))  # type: ignore[arg-type]
    assert not torch.equal(norms(state.model)[0].weight, weight)


def test_the_step_is_built_again_when_the_statistics_freeze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast step is prepared for one mode of each module; with another it would run eagerly for the rest of the training."""
    run, loaded = tiny_run(tmp_path, **ROUGH, freeze_norm_after=1, epochs=3)
    built: list[int] = []
    build = TrainingState.build_step
    monkeypatch.setattr(TrainingState, "build_step", lambda state: built.append(state.epoch) or build(state))
    train_to_the_end(run, loaded)
    assert built == [0, 1]


def test_smoothed_labels_have_a_larger_loss(tmp_path: Path) -> None:
    losses = []
    for number, smoothing in enumerate((0.0, 0.3)):
        (tmp_path / str(number)).mkdir()
        run, loaded = tiny_run(tmp_path / str(number), label_smoothing=smoothing, epochs=6)
        train_to_the_end(run, loaded)
        losses.append(run.metrics()[-1]["loss"])
    assert losses[0] < 0.5 < losses[1]


def test_runs_of_earlier_versions_have_the_usual_values(tmp_path: Path) -> None:
    config = tiny_study(tmp_path).runs("tiny")[0]
    flat = config.to_flat()
    assert not EVERYTHING.keys() & flat.keys()
    assert RunConfig.from_flat(flat, "here") == config
    changed = tiny_study(tmp_path, **EVERYTHING).runs("tiny")[0]
    assert RunConfig.from_flat(changed.to_flat(), "here") == changed
    assert EVERYTHING.items() <= changed.to_flat().items()


@pytest.mark.parametrize(
    ("name", "value"), [("label_smoothing", 1.0), ("average_weights", 1.0), ("average_weights", -0.1), ("freeze_norm_after", 0)]
)
def test_bad_values_are_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(StudyError, match=f"{name} must be"):
        tiny_study(tmp_path, **{name: value})
