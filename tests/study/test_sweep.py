"""The grid: every point once, none lost, and the choice by the stated rule on the validation split alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.study.small_studies import CPU, SILENT, tiny_study
from wassersmooth import cli
from wassersmooth.study import data, figures, presets
from wassersmooth.study.config import Study
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset
from wassersmooth.study.errors import RunStoppedError, StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run, runs_in
from wassersmooth.study.search import heatmap, sweep
from wassersmooth.study.search.selection import SELECTIONS, Measured, choose, read_sweep, select
from wassersmooth.study.search.shared_grid import VARIED, SharedGrid
from wassersmooth.study.search.sweep import Grid

optuna = pytest.importorskip("optuna")
GRID = Grid(etas=(0.1, 0.2), radii=(1, 2), masses=(0.0,))


def point(eta: float = 0.1, radius: int = 1) -> Regularizer:
    return Regularizer("wasserstein", eta, radius)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([(10.0, 50.0), (10.9, 40.0), (11.1, 10.0)], 1),  # the third one costs more than a point of clean error
        ([(10.0, 50.0), (11.0, 40.0)], 1),  # exactly one point is allowed
        ([(10.0, 40.0), (9.5, 40.0)], 1),  # a tie goes to the lower clean error
        ([(100.0, 100.0), (10.0, 90.0)], 1),
        ([(10.0, 50.0)], 0),
    ],
)
def test_the_rule(errors: list[tuple[float, float]], expected: int) -> None:
    measured = [Measured(point(0.1 * (k + 1)), clean, robust) for k, (clean, robust) in enumerate(errors)]
    assert choose(measured) == measured[expected]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=8))
def test_the_rule_holds_for_any_grid(errors: list[tuple[float, float]]) -> None:
    measured = [Measured(point(k + 1.0), clean, robust) for k, (clean, robust) in enumerate(errors)]
    chosen = choose(measured)
    best = min(m.clean for m in measured)
    assert chosen.clean <= best + 1
    assert all(m.robust >= chosen.robust for m in measured if m.clean <= best + 1)


def test_a_network_that_answers_with_one_class_is_never_chosen() -> None:
    good, constant = Measured(point(0.1), 30.0, 80.0), Measured(point(1.0), 29.0, 29.0, one_answer=True)
    assert choose([good, constant]) == good
    selected = select([good, constant], Measured(Regularizer("none"), 30.0, 90.0))
    assert set(selected.values()) == {good}
    with pytest.raises(StudyError, match="all 1 points of the grid have networks that give all images one label"):
        choose([constant])


def test_such_a_network_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The strong penalty is replaced by a network whose head is zero: its attacks never succeed."""
    original = Run.load_model

    def load_model(self: Run, data: Dataset | None = None) -> nn.Module:
        model = original(self, data)
        if self.config.regularizer.eta == 1.0:
            for parameter in list(model.parameters())[-2:]:
                nn.init.zeros_(parameter)
        return model

    monkeypatch.setattr(Run, "load_model", load_model)
    study = tiny_study(tmp_path, epochs=1)
    for _ in range(2):  # the second time from the journal
        grid = Grid(etas=(0.1, 1.0), radii=(1,))
        assert sweep.sweep(study, grid, "tiny", tmp_path / "sweep", CPU, Console()).eta == 0.1
    shown = capsys.readouterr().out
    assert shown.count("gives all images one label, so it cannot be chosen") == 1
    assert shown.count("one label for all") == 2
    stored = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [one["one_answer"] for one in stored["points"]] == [False, True]


def run_sweep(study: Study, folder: Path, grid: Grid = GRID) -> Regularizer:
    return sweep.sweep(study, grid, "tiny", folder, CPU, SILENT)


@pytest.mark.slow
def test_a_sweep_measures_every_point_once_and_draws_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tiny_study(tmp_path, epochs=2, seeds=(0, 1))
    measured: list[Regularizer] = []
    original = sweep._measure
    monkeypatch.setattr(sweep, "_measure", lambda study, found, *rest: measured.extend(found) or original(study, found, *rest))
    original_load = data.load

    def without_test_images(config: data.Data, test_images: int | None = None) -> data.Dataset:
        loaded = original_load(config, test_images)
        return dataclasses.replace(loaded, test=data.Part(torch.full_like(loaded.test.images, torch.nan), loaded.test.labels))

    monkeypatch.setattr(data, "load", without_test_images)
    chosen = run_sweep(study, tmp_path / "sweep")
    assert sorted(measured, key=str) == sorted([Regularizer("none"), *GRID.points()], key=str)
    stored = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert len(stored["points"]) == 4
    assert Regularizer(**stored["chosen"]["point"]) == chosen
    assert {entry["seeds"] for entry in stored["points"]} == {2}
    assert stored["searches"]["wasserstein"]["recipe"]["images"] == len(original_load(study.data).validation) > 0
    monkeypatch.setattr(sweep, "IMAGES", 3)
    with pytest.raises(StudyError, match="other values of images"):  # results on other images cannot be compared
        run_sweep(study, tmp_path / "sweep")
    monkeypatch.undo()
    monkeypatch.setattr(sweep, "_measure", lambda study, found, *rest: measured.extend(found) or original(study, found, *rest))
    assert (tmp_path / "sweep" / "heatmap-wasserstein.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list((tmp_path / "sweep").glob("*/model.safetensors"))) == 10

    run_sweep(study, tmp_path / "sweep")  # again: nothing is left to do
    larger = dataclasses.replace(GRID, etas=(0.1, 0.2, 0.4))
    run_sweep(study, tmp_path / "sweep", larger)  # a larger grid keeps what was measured
    assert sorted(measured, key=str) == sorted([Regularizer("none"), *larger.points()], key=str)


def test_both_selections_of_both_kinds_are_stored_beside_the_unregularized_network(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, epochs=2, parallel=3)
    run_sweep(study, tmp_path / "sweep", dataclasses.replace(GRID, radii=(1,)))
    run_sweep(study, tmp_path / "sweep", Grid("euclidean", etas=(0.1, 0.2)))
    assert {run.config.machine.parallel for run in runs_in(tmp_path / "sweep")} == {3}, "a report must not compare their times"
    stored = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert stored["searches"].keys() == {"wasserstein", "euclidean"}
    pictures = {path.name for path in (tmp_path / "sweep").glob("*.png")}
    assert pictures == {"heatmap-wasserstein.png", "heatmap-euclidean.png"}
    plain = [search["unregularized"] for search in stored["searches"].values()]
    assert plain[0] == plain[1]
    assert plain[0]["point"]["kind"] == "none"
    for kind, search in stored["searches"].items():
        points = [Measured(Regularizer(**p["point"]), p["clean"], p["robust"], p["seeds"]) for p in search["points"]]
        assert {p.point.kind for p in points} == {kind}
        expected = select(points, Measured(Regularizer("none"), plain[0]["clean"], plain[0]["robust"]))
        for rule in SELECTIONS:
            found = stored["selected"][rule][kind]
            assert found == (None if expected[rule] is None else dataclasses.asdict(expected[rule]))
    train = presets.with_file(Study(), tmp_path / "sweep" / "selected.toml")
    selected = [one["point"] for kinds in stored["selected"].values() for one in kinds.values() if one is not None]
    assert {*map(Regularizer.parse, train.regularizers)} == {Regularizer("none"), *(Regularizer(**p) for p in selected)}


def test_a_sweep_trains_the_point_that_it_records(tmp_path: Path) -> None:
    grid = Grid("adversarial", etas=(8 / 255, 0.01234567))
    run_sweep(tiny_study(tmp_path, epochs=1), tmp_path / "sweep", grid)
    trained = {run.folder.name: run.config.regularizer for run in runs_in(tmp_path / "sweep")}
    assert set(trained.values()) == {Regularizer("none"), *grid.points()}
    assert trained["adversarial-eta8_255-seed0"].eta == 8 / 255


def test_sweeps_of_several_kinds_that_end_at_the_same_time_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Measured(Regularizer("none"), 10.0, 50.0)

    def conclude(kind: str) -> None:
        sweep._conclude([Measured(Regularizer(kind, 0.1), 10.0, 40.0)], plain, {}, tmp_path, SILENT)

    def read_slowly(path: Path, *rest: str) -> dict[str, object]:
        found = read_sweep(path, *rest)
        time.sleep(0.3)  # long enough for the other process to read the same
        return found

    monkeypatch.setattr(heatmap, "draw", lambda *rest: None)
    monkeypatch.setattr(figures, "to_png", lambda *rest: b"not drawn")
    conclude("euclidean")
    monkeypatch.setattr(sweep, "read_sweep", read_slowly)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(conclude, ["dual-norm", "pgd7"]))
    kinds = {"euclidean", "dual-norm", "pgd7"}
    assert read_sweep(tmp_path / "sweep.json", "a sweep")["searches"].keys() == kinds
    train = presets.with_file(Study(), tmp_path / "selected.toml")
    assert {Regularizer.parse(text).kind for text in train.regularizers} == {"none", *kinds}


def test_a_preset_may_hold_the_grid(tmp_path: Path) -> None:
    grid = cli.parse(["sweep", "--preset", "cifar10-sweep", "--regularizer", "euclidean"]).grid  # type: ignore[attr-defined]
    assert (grid.radii, grid.regularizer) == ((2, 4, 6, 8), "euclidean")
    assert len(grid.etas) >= 5
    assert cli.parse(["train", "--preset", "cifar10-sweep"]).training.epochs == 16  # type: ignore[attr-defined]
    path = tmp_path / "mine.toml"
    path.write_text("[sweep]\nthetas = [0.1]\n")
    with pytest.raises(StudyError, match=r"unknown 'thetas' in \[sweep\]"):
        cli.parse(["sweep", "--config", str(path)])


@pytest.mark.parametrize("way", ["flags", "file"])
def test_strengths_may_be_ratios_as_in_a_regularizer(tmp_path: Path, way: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[sweep]\nregularizer = "pgd7"\netas = ["4/255", "8/255", "0.3"]\n')
    flags = ["--regularizer", "pgd7", "--etas", "4/255", "8/255", "0.3"] if way == "flags" else ["--config", str(path)]
    grid = cli.parse(["sweep", *flags]).grid  # type: ignore[attr-defined]
    assert grid.points() == [Regularizer.parse(f"pgd7:eta={eta}") for eta in ("4/255", "8/255", "0.3")]
    assert [point.eta for point in grid.points()] == [4 / 255, 8 / 255, 0.3]
    with pytest.raises(StudyError, match="each value once"):
        dataclasses.replace(grid, etas=("8/255", str(8 / 255))).points()


def test_whole_numbers_in_a_file_are_strengths_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[sweep]\netas = [1, 0.5, 3]\nmasses = [0]\n")
    grid = cli.parse(["sweep", "--config", str(path)]).grid  # type: ignore[attr-defined]
    assert [grid.etas, grid.masses] == [(1.0, 0.5, 3.0), (0.0,)]
    assert all(type(value) is float for value in (*grid.etas, *grid.masses))
    path.write_text('[sweep]\netas = [1, "8/255"]\n')
    with pytest.raises(StudyError, match="etas must be a list of float or a list of str"):
        cli.parse(["sweep", "--config", str(path)])


def test_numbers_of_a_grid_keep_every_bit() -> None:
    etas, masses = (0.1 + 0.2, 1e-7 / 3, 1e18), (0.0, 2 / 3)
    expected = [Regularizer("wasserstein", eta, radius, mass) for eta in etas for radius in (1, 5) for mass in masses]
    assert Grid(etas=etas, radii=(1, 5), masses=masses).points() == expected


def test_the_selections_by_name() -> None:
    plain = Measured(Regularizer("none"), 10.0, 100.0)
    cheap, dear = Measured(point(0.1), 11.0, 60.0), Measured(point(0.2), 30.0, 40.0)
    assert select([cheap, dear], plain) == {"within_one_point": cheap, "most_robust": dear}
    assert select([dear], plain) == {"within_one_point": None, "most_robust": dear}
    beyond = Measured(point(0.3), 11.01, 20.0)
    assert select([cheap, beyond], plain)["within_one_point"] == cheap


@pytest.mark.parametrize(("kind", "radii", "masses"), [("euclidean", (0,), (0.0,)), ("wasserstein", (2, 4), (0.0, 0.5))])
def test_the_heat_map_has_room_for_its_title_and_a_radius_where_there_is_one(
    kind: str, radii: tuple[int, ...], masses: tuple[float, ...]
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    points = [Regularizer(kind, 0.1, radius, mass) for radius in radii for mass in masses]
    measured = [Measured(point, 1.0, 2.0 + number) for number, point in enumerate(points)]
    figure = heatmap.draw(measured, measured[0])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (title,) = [text for text in figure.texts if text.get_text().startswith(kind)]
    box = title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    panels = figure.axes[: len(masses)]
    assert {axes.get_xlabel() for axes in panels} == ({"radius, pixels"} if any(radii) else {""})
    ticks = [[label.get_text() for label in axes.get_xticklabels()] for axes in panels]
    assert ticks == [[str(radius) for radius in radii if radius]] * len(masses)


def test_a_choice_that_is_no_better_than_no_regularizer_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Measured(Regularizer("none"), 10.0, 50.0)
    for found, said in (
        (Measured(point(0.2), 10.5, 51.0), True),
        (Measured(point(0.2), 10.5, 49.0), False),
        (Measured(point(0.2), 9.5, 51.0), False),
    ):
        sweep._conclude([found], plain, {}, tmp_path, Console())
        line = (
            "warning: the chosen point is no better than the unregularized network, neither in clean nor in robust error (10.50"
        )
        assert (line in capsys.readouterr().out) == said


def test_a_point_that_diverges_is_measured_as_always_wrong(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, epochs=2, learning_rate=0.02)
    chosen = run_sweep(study, tmp_path / "sweep", Grid(etas=(0.1, 1e18), radii=(1,)))
    assert chosen.eta == 0.1
    stored = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [entry["robust"] for entry in stored["points"]][1] == 100


def shared(tmp_path: Path, grace: float = 300.0, recipe: str = "a") -> SharedGrid:
    return SharedGrid(GRID.points(), "test", str(tmp_path / "sweep.journal"), grace, {"recipe": recipe})


def finish(grid: SharedGrid, trial: optuna.Trial) -> Regularizer:
    found = grid.point_of(trial)
    grid.finish(trial, Measured(found, 1.0, 2.0))
    return found


def test_two_workers_share_the_points(tmp_path: Path) -> None:
    first, second = shared(tmp_path), shared(tmp_path)
    done = []
    for _ in range(2):
        trials = [(worker, worker.next_trial(SILENT)) for worker in (first, second)]
        done += [finish(worker, trial) for worker, trial in trials if trial is not None]
    assert sorted(done, key=str) == sorted(GRID.points(), key=str)
    assert first.next_trial(SILENT) is second.next_trial(SILENT) is None


@pytest.mark.parametrize("kind", ["deformation", "advection-noise", "reference-noise", "pgd7"])
def test_the_strength_of_every_kind_with_one_is_searched(tmp_path: Path, kind: str) -> None:
    points = Grid(kind, etas=(0.1, 0.2), radii=(1,)).points()
    grid = SharedGrid(points, "test", str(tmp_path / "sweep.journal"), 300.0, {})
    done = []
    while (trial := grid.next_trial(SILENT)) is not None:
        done.append(finish(grid, trial))
    assert sorted(done, key=str) == points == [measured.point for measured in grid.measured()]


def test_a_point_drawn_twice_stays_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shared(tmp_path), shared(tmp_path)
    held = first.next_trial(SILENT)
    assert held is not None
    twice = first.point_of(held)
    second.study.enqueue_trial({name: getattr(twice, name) for name in VARIED})  # the collision, made certain
    other = second.next_trial(SILENT)
    assert other is not None
    assert second.point_of(other) != twice


def die_with_a_point(tmp_path: Path) -> int:
    """A worker that takes a point and is killed."""
    child = os.fork()
    if child == 0:
        try:
            grid = shared(tmp_path)
            with grid.heartbeat(grid.next_trial(SILENT)):  # type: ignore[arg-type]
                (tmp_path / "working").touch()
                time.sleep(60)
        finally:
            os._exit(0)
    limit = time.monotonic() + 30
    while not (tmp_path / "working").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return child


def test_the_point_of_a_killed_worker_is_measured_by_another(tmp_path: Path) -> None:
    die_with_a_point(tmp_path)
    survivor = shared(tmp_path)
    done = []
    while (trial := survivor.next_trial(SILENT)) is not None:
        done.append(finish(survivor, trial))
    assert sorted(done, key=str) == sorted(GRID.points(), key=str)
    assert len(survivor.study.trials) == len(GRID.points()) + 1  # the dead one, and each point once


def test_a_worker_on_another_machine_counts_as_dead_after_the_grace(tmp_path: Path) -> None:
    gone, survivor = shared(tmp_path), shared(tmp_path, grace=1.0)
    trial = gone.next_trial(SILENT)
    assert trial is not None
    lost = gone.point_of(trial)
    trial.set_user_attr("worker", ["elsewhere", 1, time.time()])
    done = []
    while (next_one := survivor.next_trial(SILENT)) is not None:
        done.append(finish(survivor, next_one))
    assert sorted(done, key=str) == sorted(GRID.points(), key=str)
    assert done[-1] == lost  # the survivor waited for it


def test_a_point_is_released_when_its_worker_raises(tmp_path: Path) -> None:
    grid = shared(tmp_path)
    trial = grid.next_trial(SILENT)
    assert trial is not None
    with pytest.raises(KeyboardInterrupt), grid.heartbeat(trial):
        raise KeyboardInterrupt
    done = []
    while (next_one := grid.next_trial(SILENT)) is not None:
        done.append(finish(grid, next_one))
    assert sorted(done, key=str) == sorted(GRID.points(), key=str)


def test_a_storage_that_is_gone_does_not_hide_why_a_worker_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = shared(tmp_path)
    trial = grid.next_trial(SILENT)
    assert trial is not None

    def gone(*arguments: object, **options: object) -> None:
        raise ConnectionError("server closed the connection")

    monkeypatch.setattr(grid.study, "tell", gone)
    with pytest.raises(StudyError, match="no space left"), grid.heartbeat(trial):
        raise StudyError("no space left")
    monkeypatch.setattr(trial, "suggest_float", gone)
    with pytest.raises(StudyError, match=r"--storage .* cannot be used \(server closed the connection\)"):
        grid.point_of(trial)


def test_a_full_disk_is_no_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = shared(tmp_path)

    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(grid.study, "ask", full)
    with pytest.raises(RunStoppedError, match=r"journal.* cannot be written \(No space left on device\)"):
        grid.next_trial(SILENT)


def test_one_heartbeat_that_fails_does_not_end_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SharedGrid(GRID.points(), "test", str(tmp_path / "journal"), grace=0.2, recipe={})
    trial = grid.next_trial(SILENT)
    assert trial is not None
    beats: list[float] = []

    def beat(trial: object) -> None:
        beats.append(time.time())
        if len(beats) == 1:
            raise OSError("the disk is busy")

    monkeypatch.setattr(grid, "_beat", beat)
    with grid.heartbeat(trial):
        deadline = time.time() + 10
        while len(beats) < 3 and time.time() < deadline:
            time.sleep(0.02)
    assert len(beats) >= 3


def test_points_are_attacked_in_full_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    errors = sweep._errors

    def noted(*given: object) -> tuple[float, float]:
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return errors(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "_errors", noted)
    study = tiny_study(tmp_path, epochs=1, precision="tf32")
    sweep.sweep(study, Grid("euclidean", (0.1,)), "tiny", tmp_path / "sweep", CPU, SILENT)
    assert seen == [(False, False)] * 2
    assert torch.backends.cudnn.allow_tf32, "the next points are trained as they were asked to be"


def test_workers_must_agree_on_everything_else(tmp_path: Path) -> None:
    shared(tmp_path)
    with pytest.raises(StudyError, match="this sweep was started with other values of recipe"):
        shared(tmp_path, recipe="b")


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 25, None])
def test_half_a_line_at_the_end_of_the_journal_is_cut_off(tmp_path: Path, cut: int | None) -> None:
    grid, journal = shared(tmp_path), tmp_path / "sweep.journal"
    for _ in range(2):
        finish(grid, grid.next_trial(SILENT))  # type: ignore[arg-type]
    content = journal.read_bytes()
    torn = content + b'{"op_code":6,"wor{"op_code":0}\n' if cut is None else content[:-cut]
    journal.write_bytes(torn)
    survivor = shared(tmp_path, grace=0.5)
    assert len(survivor.measured()) == (2 if cut is None else 1), "what was told in that line is told again"
    while (trial := survivor.next_trial(SILENT)) is not None:
        finish(survivor, trial)
    assert len(shared(tmp_path).measured()) == 4
    assert not list(tmp_path.glob("*.lock"))


def test_a_foreign_file_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "sweep.journal").write_text("years of work\nand no end")
    with pytest.raises(StudyError, match="cannot be used"):
        shared(tmp_path)
    assert (tmp_path / "sweep.journal").read_text().startswith("years of work\nand no end")


def test_a_damaged_journal_is_moved_away_and_finished_runs_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, folder, grid = tiny_study(tmp_path, epochs=1), tmp_path / "sweep", dataclasses.replace(GRID, radii=(1,))
    chosen = run_sweep(study, folder, grid)
    found = (folder / "sweep.json").read_bytes()
    journal = folder / "sweep.journal"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([*lines[:3], lines[3][:-9], *lines[4:]]))
    with pytest.raises(StudyError, match="move it away and run the command again: finished runs are found"):
        run_sweep(study, folder, grid)
    journal.rename(folder / "damaged.journal")

    def refuse(*_: object) -> None:
        pytest.fail("a finished run was trained again")

    monkeypatch.setattr(sweep, "training", refuse)
    assert run_sweep(study, folder, grid) == chosen
    assert (folder / "sweep.json").read_bytes() == found


def test_a_damaged_sweep_json_does_not_lose_the_study(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{")
    found, plain = [Measured(point(), 10.0, 40.0)], Measured(Regularizer("none"), 10.0, 50.0)
    with pytest.raises(StudyError, match="; restore it, or move it away and run the sweep command of each kind again"):
        sweep._conclude(found, plain, {}, tmp_path, SILENT)


@pytest.mark.slow
def test_a_database_as_storage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    grid = SharedGrid(GRID.points(), "test", url, 300.0, {})
    trial = grid.next_trial(SILENT)
    assert trial is not None
    finish(grid, trial)
    assert len(SharedGrid(GRID.points(), "test", url, 300.0, {}).measured()) == 1


def test_bad_sweeps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="each value once"):
        Grid(etas=(0.1, 0.1)).points()
    with pytest.raises(StudyError, match=r"separated by spaces; got '0\.1,0\.3'; write --etas 0\.1 0\.3$"):
        Grid(etas=("0.1,0.3",)).points()
    with pytest.raises(StudyError, match="chooses on the validation split"):
        run_sweep(tiny_study(tmp_path, validation=0.0), tmp_path / "sweep")
    with pytest.raises(StudyError, match=r"--storage nosuchdb://x: cannot be used .*; give a journal file, or the"):
        SharedGrid(GRID.points(), "test", "nosuchdb://x", 300.0, {})
    with pytest.raises(StudyError, match="one process per worker"):
        sweep.sweep(tiny_study(tmp_path), GRID, "tiny", tmp_path, dataclasses.replace(CPU, size=2), SILENT)
    assert [p.radius for p in Grid("euclidean").points()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("chosen", "etas", "radii", "edges"),
    [
        ((0.2, 2), (0.1, 0.2, 0.3), (1, 2, 4), ""),
        ((0.1, 1), (0.1, 0.2, 0.3), (1, 2, 4), "eta 0.1 is the smallest tried"),
        ((0.3, 4), (0.1, 0.2, 0.3), (1, 2, 4), "eta 0.3 is the largest tried and radius 4 is the largest tried"),
        ((0.2, 4), (0.1, 0.2, 0.3), (1, 2, 4), "radius 4 is the largest tried"),
        ((0.1, 4), (0.1,), (4,), ""),
    ],
)
def test_a_choice_at_the_edge_of_the_grid_gives_a_warning(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    chosen: tuple[float, int],
    etas: tuple[float, ...],
    radii: tuple[int, ...],
    edges: str,
) -> None:
    points = [(eta, radius) for eta in etas for radius in radii]
    found = [Measured(point(*one), 9.0, 30.0 if one == chosen else 40.0) for one in points]
    assert sweep._conclude(found, Measured(Regularizer("none"), 10.0, 50.0), {}, tmp_path, Console()) == point(*chosen)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(said) == bool(edges)
    assert all(line.startswith(f"warning: the chosen point lies at the edge of the grid: {edges}; ") for line in said)


def test_regularizers_of_a_preset_or_a_file_do_not_stop_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wassersmooth.study.commands.sweep", lambda *arguments: None)
    path = tmp_path / "mine.toml"
    path.write_text('regularizers = ["none", "euclidean:eta=0.2"]\n')
    assert cli.main(["sweep", "--device", "cpu"]) == 0
    assert cli.main(["sweep", "--device", "cpu", "--preset", "mnist", "--config", str(path)]) == 0
    assert cli.main(["sweep", "--device", "cpu", "--config", str(path), "--regularizers", "euclidean:eta=0.3"]) == 2


def test_remarks_are_printed_before_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tiny_study(tmp_path, epochs=1, milestones=(5,))
    sweep.sweep(study, Grid(etas=(0.1,), radii=(1,)), "tiny", tmp_path / "sweep", CPU, Console())
    assert capsys.readouterr().out.count("--milestones 5: never reached in 1 epoch,") == 1
