"""The loop: it learns, follows its schedule, stops early, and resumes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.robustness.small_models import Around
from tests.study.small_studies import CPU, SILENT, tiny_run, tiny_study, train_to_the_end
from wassersmooth._checks import NotFiniteError
from wassersmooth.study import checkpoints, experiment
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset, Part
from wassersmooth.study.errors import DivergedError, RunStoppedError, StudyError
from wassersmooth.study.runs import NEW_FIELDS, Run
from wassersmooth.study.training import (
    EVALUATION_BATCH,
    TrainingState,
    _require_finite,
    attacked_error,
    error_percent,
    training,
)

PENALTIES = ["none", "euclidean:eta=0.2", "wasserstein:eta=0.3,radius=2", "uniform:eta=0.3,radius=1,mass=0.1"]
PENALTIES += ["dual-length:eta=0.2", "wasserstein-length:eta=0.2,radius=1", "euclidean-length:eta=0.2"]
PENALTIES += ["dual-norm:eta=0.2", "wasserstein+l2-adversarial:eta=0.2,radius=1,epsilon=0.1"]
PENALTIES += ["euclidean+wasserstein-adversarial:eta=0.1,radius=1,epsilon=0.1"]
OTHERS = ["euclidean-noise:eta=0.05", "wasserstein-noise:eta=0.05,radius=1", "adversarial:eta=0.02"]
OTHERS += ["l2-adversarial:eta=0.1", "pgd7:eta=0.02", "wasserstein-adversarial:eta=0.1,radius=1"]
BATCH = EVALUATION_BATCH["cpu"]
SIGNED = ["tikhonov:eta=0.2,radius=1", "tikhonov-euclidean:eta=0.1"]  # a Laplacian may be negative


def weights(run: Run) -> dict[str, torch.Tensor]:
    return checkpoints.load(run.folder / "model.safetensors").tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("regularizer", PENALTIES + OTHERS + SIGNED)
def test_every_regularizer_trains(tmp_path: Path, regularizer: str) -> None:
    run, loaded = tiny_run(tmp_path, regularizers=(regularizer,), epochs=8)
    train_to_the_end(run, loaded)
    rows = run.metrics()
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    if regularizer in SIGNED:
        assert rows[-1]["penalty"] != 0
    else:
        assert (rows[-1]["penalty"] > 0) == (regularizer in PENALTIES[1:])


def test_the_rate_falls_at_the_milestones(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=5, milestones=(2, 4))
    train_to_the_end(run, loaded)
    assert [row["learning_rate"] for row in run.metrics()] == pytest.approx([0.02, 0.02, 0.002, 0.002, 0.0002])


def test_eta_grows_to_its_full_strength(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, regularizers=("euclidean:eta=0.4",), epochs=5, eta_ramp=4)
    state = TrainingState(run.config, loaded, CPU)
    etas = []
    for _ in range(5):
        state.begin_epoch()
        etas.append(state.eta.item())
        state.end_epoch(None)
    assert etas == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_a_ramp_that_does_not_end_gives_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tiny_study(tmp_path, regularizers=("none", "euclidean:eta=0.4"), epochs=2, eta_ramp=8)
    experiment.train(study, "tiny", tmp_path / "runs", CPU, Console())
    said = [line for line in capsys.readouterr().out.splitlines() if "strength" in line]
    assert said == ["euclidean-eta0.4-seed0: eta ends at 2/8 of its strength; shorten --eta-ramp, or train longer"]
    experiment.train(
        dataclasses.replace(study, training=dataclasses.replace(study.training, eta_ramp=2)),
        "whole",
        tmp_path / "whole",
        CPU,
        Console(),
    )
    assert "strength" not in capsys.readouterr().out


def test_the_ramp_reaches_the_objective(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, regularizers=("euclidean:eta=0.4",), eta_ramp=4)
    state = TrainingState(run.config, loaded, CPU)
    images, labels = loaded.train.images[:8], loaded.train.labels[:8]
    state.optimizer.param_groups[0]["lr"] = 0.0
    step = state.build_step()
    penalties = []
    for eta in (0.1, 0.2):
        state.eta.fill_(eta)
        penalties.append(step(images, labels, 1.0)[1].item())
    assert penalties[1] == pytest.approx(4 * penalties[0], rel=1e-4)


@pytest.mark.parametrize("limit", [None, 3, BATCH + 1])
def test_the_error_is_that_of_the_first_images(limit: int | None) -> None:
    """The network predicts the position of the bright pixel, which is wrong for every third image."""
    labels = torch.arange(BATCH + 20) % 4
    images = torch.zeros(len(labels), 1, 1, 4)
    images[torch.arange(len(labels)), 0, 0, (labels + (torch.arange(len(labels)) % 3 == 0)) % 4] = 1
    wrong = (torch.arange(len(labels)) % 3 == 0)[:limit]
    found = error_percent(torch.nn.Flatten(), Part(images, labels), limit)
    assert found is not None
    assert found.item() == pytest.approx(100 * wrong.double().mean().item())
    assert error_percent(torch.nn.Flatten(), Part(images[:0], labels[:0])) is None


def test_images_are_protected_from_models_that_change_their_input() -> None:
    images, labels = torch.rand(12, 1, 1, 3), torch.arange(12) % 3
    before = images.clone()
    error_percent(Around(torch.nn.Flatten(), lambda x: x.sub_(0.5)), Part(images, labels))
    assert torch.equal(images, before)


def test_early_stopping_keeps_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([30.0, 10.0, 20.0, 10.0, 15.0, 0.0])
    run, loaded = tiny_run(tmp_path, epochs=20, patience=3)
    monkeypatch.setattr(
        "wassersmooth.study.training.error_percent", lambda model, part, limit=None: 0.0 if limit else next(errors)
    )
    seen = []
    original = TrainingState.end_epoch

    def end_epoch(state: TrainingState, validation_error: float | None) -> None:
        original(state, validation_error)
        seen.append({name: t.clone() for name, t in state.model.state_dict().items()})

    monkeypatch.setattr(TrainingState, "end_epoch", end_epoch)
    train_to_the_end(run, loaded)
    assert len(run.metrics()) == 5  # the second epoch was the best; three more did not beat it
    assert same(weights(run), seen[1])


def with_errors(run: Run, loaded: Dataset, errors: list[float]) -> TrainingState:
    """A state after that many epochs; the last bias is the number of the epoch."""
    state = TrainingState(run.config, loaded, CPU)
    for number, validation_error in enumerate(errors, 1):
        state.begin_epoch()
        list(state.model.parameters())[-1].data.fill_(number)
        state.end_epoch(validation_error)
    return state


def test_no_epoch_of_a_ramp_is_the_best_one(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, regularizers=("euclidean:eta=0.4",), epochs=20, patience=2, eta_ramp=4)
    during = with_errors(run, loaded, [5.0, 6.0, 7.0])
    assert (during.best_epoch, during.best) == (0, {})
    assert not during.out_of_patience
    assert not with_errors(run, loaded, [5.0, 6.0, 7.0, 30.0, 31.0]).out_of_patience
    after = with_errors(run, loaded, [5.0, 6.0, 7.0, 30.0, 31.0, 32.0])
    assert after.out_of_patience
    after.restore_best()
    assert set(list(after.model.parameters())[-1].tolist()) == {4.0}, "the first epoch with all of eta"


@pytest.mark.parametrize("regularizer", ["none", "pgd7:eta=8/255"])
def test_without_a_ramp_patience_counts_from_the_start(tmp_path: Path, regularizer: str) -> None:
    run, loaded = tiny_run(tmp_path, regularizers=(regularizer,), epochs=20, patience=2, eta_ramp=10)
    assert with_errors(run, loaded, [5.0, 6.0, 7.0]).out_of_patience


def test_the_checkpoints_of_earlier_versions_resume(tmp_path: Path) -> None:
    """They hold a schedule, which is not needed, and perhaps a best epoch inside the ramp."""
    run, loaded = tiny_run(tmp_path, regularizers=("euclidean:eta=0.4",), epochs=20, patience=2, eta_ramp=4)
    with run.claimed():
        with_errors(run, loaded, [5.0, 6.0]).save(run)
        for epoch in (1, 2):
            run.append_metrics({"epoch": epoch, "seconds": 1.0})
        stored = checkpoints.load(run.checkpoint_path)
        earlier = {"best_error": 5.0, "best_epoch": 1, "schedule": {"learning_rate": 0.02, "eta": 0.2}}
        best = {f"best/{name}": tensor for name, tensor in stored.with_prefix("model").items()}
        checkpoints.save(run.checkpoint_path, stored.tensors | best, stored.facts | earlier)
        state = TrainingState(run.config, loaded, CPU)
        state.resume(run)
    assert (state.epoch, state.best_epoch, state.best) == (2, 0, {})
    assert state.begin_epoch() == 0.02
    assert state.eta.item() == pytest.approx(0.3)


def test_a_run_that_stopped_early_is_not_continued(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=40, patience=2)
    train_to_the_end(run, loaded)
    before, epochs = weights(run), len(run.metrics())
    (run.folder / "model.safetensors").unlink()
    train_to_the_end(run, loaded)
    assert same(weights(run), before)
    assert len(run.metrics()) == epochs


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=4, learning_rate=1e30)
    complaint = r"the loss is nan at step \d+ \(epoch 1\) with learning rate 1e\+30; the last good checkpoint is none"
    with pytest.raises(RunStoppedError, match=complaint) as caught:
        train_to_the_end(run, loaded)
    assert caught.value.exit_code == 1
    assert not run.checkpoint_path.exists()


def test_a_loss_that_is_checked_at_the_end_of_an_epoch_names_its_step_too(tmp_path: Path) -> None:
    """On CUDA losses are checked only at the end of an epoch."""
    run, loaded = tiny_run(tmp_path)
    state = TrainingState(run.config, loaded, CPU)
    state.steps = 25
    latest = torch.tensor([[1.0, 0.0], [1.0, torch.inf], [torch.nan, 0.0]])
    with pytest.raises(RunStoppedError, match="the loss is inf at step 24"):
        _require_finite(latest, state, run)
    _require_finite(latest[:1], state, run)


def test_the_last_good_checkpoint_is_named_and_kept(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=3)
    going = training(run, loaded, CPU, SILENT)
    with run.claimed():
        while not run.checkpoint_path.exists():
            next(going)
        before = run.checkpoint_path.read_bytes()
        loaded.train.images.fill_(torch.inf)
        with pytest.raises(RunStoppedError, match=r"the last good checkpoint is .*checkpoint\.safetensors of epoch 1"):
            list(going)
    assert run.checkpoint_path.read_bytes() == before


@pytest.mark.parametrize("regularizer", ["none", "wasserstein:eta=0.3,radius=2", "wasserstein-noise:eta=0.05,radius=1"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, regularizer: str) -> None:
    options = {"regularizers": (regularizer,), "epochs": 5, "patience": 4, "augment": True, "eta_ramp": 3}
    whole, loaded = tiny_run(tmp_path, **options)
    train_to_the_end(whole, loaded)
    steps = 5 * len(loaded.train.labels.split(16))
    broken = Run(tmp_path / "broken", whole.config)
    for stop in (0, 1, steps // 3, steps // 2, steps - 1):
        with broken.claimed():
            for number, _ in enumerate(training(broken, loaded, CPU, SILENT)):
                torch.rand(3)  # other code uses the global random state
                if number == stop:
                    break
    train_to_the_end(broken, loaded)
    assert same(weights(broken), weights(whole))
    drop = "seconds"
    rows = [[{k: v for k, v in row.items() if k != drop} for row in run.metrics()] for run in (broken, whole)]
    assert rows[0] == rows[1]


def test_fewer_checkpoints_give_the_same_weights(tmp_path: Path) -> None:
    first, loaded = tiny_run(tmp_path, epochs=5)
    train_to_the_end(first, loaded)
    rare = dataclasses.replace(first.config, training=dataclasses.replace(first.config.training, checkpoint_every=3))
    second = Run(tmp_path / "rare", rare)
    train_to_the_end(second, loaded)
    assert same(weights(first), weights(second))
    assert checkpoints.load(second.checkpoint_path).facts["epoch"] == 5


def test_epochs_after_the_checkpoint_are_repeated_and_appear_in_the_metrics_once(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=5, checkpoint_every=2)
    with run.claimed():
        for _ in training(run, loaded, CPU, SILENT):
            if len(run.metrics()) == 3:
                break  # the third epoch is in the metrics and in no checkpoint
    assert checkpoints.load(run.checkpoint_path).facts["epoch"] == 2
    train_to_the_end(run, loaded)
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3, 4, 5]


def test_seeds_differ_and_a_seed_repeats(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, seeds=(0, 1))
    for folder in ("a", "b"):
        experiment.train(study, "tiny", tmp_path / folder, CPU, SILENT)
    a0, a1, b0 = (Run.at(tmp_path / name) for name in ("a/none-seed0", "a/none-seed1", "b/none-seed0"))
    assert same(weights(a0), weights(b0))
    assert not same(weights(a0), weights(a1))


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tiny_study(tmp_path)
    experiment.train(study, "tiny", tmp_path / "a", CPU, SILENT)
    monkeypatch.setattr(experiment, "training", lambda *arguments: pytest.fail("nothing was left to train"))
    experiment.train(study, "tiny", tmp_path / "a", CPU, SILENT)


def test_without_a_validation_split_the_column_is_empty(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, validation=0.0)
    train_to_the_end(run, loaded)
    assert {row["validation_error"] for row in run.metrics()} == {None}


def test_a_regularizer_that_does_not_fit_the_images_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "dot.npz"
    np.savez(path, images=np.full((12, 1, 1, 1), 0.5), labels=np.arange(12) % 2)
    study = tiny_study(tmp_path, regularizers=("wasserstein:eta=0.1,radius=1",))
    study = dataclasses.replace(study, data=dataclasses.replace(study.data, dataset=str(path), validation=0.0))
    with pytest.raises(StudyError, match=r"wasserstein:eta=0\.1,radius=1: "):
        experiment.train(study, "tiny", tmp_path / "dot", CPU, SILENT)


@pytest.mark.parametrize(
    ("milestones", "line"),
    [
        ((1,), None),
        (
            (2, 4),
            "--milestones 2 4: never reached in 2 epochs, and the learning rate never falls; lower them below 2, give --mile",
        ),
        ((1, 2), "--milestones 2: never reached in 2 epochs, and the learning rate falls less often; lower them"),
    ],
)
def test_milestones_that_are_never_reached_give_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], milestones: tuple[int, ...], line: str | None
) -> None:
    experiment.train(tiny_study(tmp_path, epochs=2, milestones=milestones), "tiny", tmp_path / "a", CPU, Console())
    shown = capsys.readouterr().out
    assert line in shown if line else "--milestones" not in shown


def test_remarks_on_the_data_are_printed_once_for_all_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tiny_study(tmp_path, epochs=1, seeds=(0, 1))
    stored = np.load(study.data.dataset)
    np.savez(study.data.dataset, images=stored["images"], labels=stored["labels"])
    experiment.train(study, "tiny", tmp_path / "a", CPU, Console())
    assert capsys.readouterr().out.count("has no test images: 20% of its images are kept") == 1


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            NotFiniteError("the loss must be finite; got nan"),
            DivergedError,
            "the loss is nan at step 1 .* lower --learning-rate",
        ),
        (ValueError("a matrix is not positive definite"), StudyError, "seed0: a matrix is not positive definite$"),
        (ValueError("forward_mode does not run; use engine='finite_difference'"), StudyError, "forward_mode does not run"),
    ],
)
def test_only_values_that_are_not_finite_count_as_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: ValueError, kind: type[StudyError], said: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(TrainingState, "build_step", lambda state: refuse)
    with pytest.raises(StudyError, match=said) as caught:
        experiment.train(tiny_study(tmp_path), "tiny", tmp_path / "study", CPU, SILENT)
    assert type(caught.value) is kind


def test_patience_on_robust_error_keeps_the_most_robust_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    epochs = 6
    run, loaded = tiny_run(tmp_path, epochs=epochs, learning_rate=0.05, patience=epochs, patience_on="robust")
    with run.claimed():
        for _ in training(run, loaded, CPU, Console()):
            pass
    rows = run.metrics()
    assert len(rows) == epochs  # a patience of all epochs stops nothing
    robust = [row["robust_error"] for row in rows]
    assert len(set(robust)) > 1, "else any epoch would do"
    kept = float(attacked_error(run.load_model(), loaded.validation))
    assert kept == pytest.approx(min(robust))
    said = f"epoch {1 + robust.index(min(robust))} of 6 is kept, with a robust validation error of {kept:.1f} %"
    assert said in capsys.readouterr().out
    (tmp_path / "clean").mkdir()
    other, loaded = tiny_run(tmp_path / "clean", epochs=2, patience=2)
    train_to_the_end(other, loaded)
    assert "robust_error" not in other.metrics()[0]


def test_a_network_that_diverged_is_not_attacked_first(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=2, learning_rate=1e6, patience=2, patience_on="robust")
    with pytest.raises(DivergedError, match="lower --learning-rate"):
        train_to_the_end(run, loaded)


def test_a_run_of_a_version_with_fewer_fields_resumes(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=2)
    state = TrainingState(run.config, loaded, CPU)
    steps = training(run, loaded, CPU, SILENT)
    with run.claimed():
        while not run.checkpoint_path.exists():
            next(steps)
        steps.close()
    stored = checkpoints.load(run.checkpoint_path)
    for name in NEW_FIELDS:
        del stored.facts["config"][name]
    checkpoints.save(run.checkpoint_path, stored.tensors, stored.facts)
    path = run.folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in NEW_FIELDS}))
    state.resume(run)
    assert state.epoch == 1
    train_to_the_end(run, loaded)
    assert run.finished
    changed = dataclasses.replace(run.config, training=dataclasses.replace(run.config.training, patience_on="robust"))
    with pytest.raises(StudyError, match="patience_on was 'clean' and is now 'robust'"), Run(run.folder, changed).claimed():
        pass
