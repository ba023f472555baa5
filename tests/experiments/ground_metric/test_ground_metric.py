"""The experiment on a few made-up images: likelihoods against the library, every command, and comparisons."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wassersmooth as ws
from experiments.ground_metric import commands, fitted, helping, likelihoods, pairs, plans
from experiments.ground_metric.commands import PROGRAM
from experiments.ground_metric.comparing import Point, chosen, difference_at_chosen, difference_at_equal_clean, points_of
from experiments.ground_metric.likelihoods import Spectra
from experiments.ground_metric.plans import SMALL, Setting, settings_of
from experiments.side_by_side import lock_of
from experiments.uncertainty import Uncertainty
from wassersmooth.cli import main
from wassersmooth.study import data
from wassersmooth.study.data import Dataset, Part
from wassersmooth.study.runs import Run, locked


def made_up(size: int = 28, channels: int = 1) -> Dataset:
    """Two classes of smooth stripes, as a data set of ten."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    wave = torch.sin(torch.arange(size) / 3.0)
    images = 0.4 + 0.3 * torch.where(labels[:, None, None, None] == 0, wave[:, None], wave).expand(40, channels, size, size)
    images = images + 0.1 * torch.rand(40, channels, size, size, generator=random)
    part = Part(images, labels)
    return Dataset(part, Part(images[:20], labels[:20]), Part(images[:12], labels[:12]), 10, "made up")


@pytest.mark.parametrize("motion", pairs.MOTIONS)
def test_pairs_are_small_moves_of_the_same_images(motion: pairs.Motion) -> None:
    before, after = pairs.make(made_up().train, motion, 10, seed=0)
    assert before.shape == after.shape == (10, 1, 14, 14)
    assert torch.equal(pairs.make(made_up().train, motion, 10, seed=0)[1], after)
    assert 0.01 < float((after - before).std()) < 0.2
    assert not bool((before == after).any())


def test_likelihoods_are_those_of_the_library_and_maximal() -> None:
    before, after = pairs.make(made_up().train, "shift", 8, seed=0)
    for metric in (ws.Deformations(14, 14, 1.0, "advection"), ws.Wasserstein(ws.PixelGraph.grid(14, 14, 2))):
        spectra = Spectra.of(metric, before, after - before)
        motion, white = spectra.maximized()
        found = spectra.log_likelihoods(motion, white)
        options = {"mass": white / motion}
        same: Any = ws.Deformations(14, 14, 1.0, "advection", **options) if isinstance(metric, ws.Deformations) else None
        same = same or ws.Wasserstein(metric.graph, **options)  # type: ignore[attr-defined]
        expected = same.cometric(before).log_prob(after - before, math.sqrt(motion)) / 196
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
        for factor in (0.97, 1.03):
            assert spectra.log_likelihoods(factor * motion, white).mean() <= found.mean() + 1e-6
            assert spectra.log_likelihoods(motion, max(factor * white, likelihoods.FLOOR)).mean() <= found.mean() + 1e-6


def test_the_plan_is_one_recipe_and_its_methods_differ() -> None:
    for dataset in plans.DATASETS:
        settings = settings_of(dataset)
        assert len({tuple(setting.key.values()) for setting in settings}) == len(settings)
        assert all(setting.family for setting in settings)
    augmented = Setting("cifar10", "none", 1.0, True, 0)
    config = augmented.config(plans.FULL, None, 4)
    assert (config.data.augment, config.data.elastic, config.training.epochs) == (True, 1.0, 24)
    assert round(config.data.validation * 50_000) == 50_000 - 351 * 128  # no last batch of another size


@pytest.mark.slow
def test_fit_train_merge_and_render(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", lambda *given: made_up())
    monkeypatch.setattr(commands, "SMALL", replace(SMALL, images=(12, 8, 6), validation=6))
    monkeypatch.setattr(plans, "MNIST", (plans.MNIST[0], plans.MNIST[1], ("none", 0.75), (f"own:{plans.FITTED},eta=0.8", 0.0)))
    monkeypatch.setattr(likelihoods, "SMOOTHNESSES", (1.0,))
    monkeypatch.setattr(fitted, "ROWS", tmp_path / "likelihoods.json")
    flags = ["--small", "--output", str(tmp_path), "--datasets", "mnist"]
    assert main(["fit", *flags, "--seeds", "0"], PROGRAM) == 0
    training = ["train", *flags, "--device", "cpu", "--runs", str(tmp_path / "runs")]
    assert main([*training, "--seconds", "0"], PROGRAM) == 0
    assert "8 rows missing (out of time, or failed, see above); the same command continues" in capsys.readouterr().out
    assert main(training, PROGRAM) == 0
    rows = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert len(rows) == 8
    assert {row["family"] for row in rows} == {"none", "coherent motion, 4 px", "elastic augmentation", "fitted weights"}
    assert main(training, PROGRAM) == 0  # nothing is left to do
    assert "all rows are there" in capsys.readouterr().out
    assert main(["merge", str(tmp_path / "training.json"), "--output", str(tmp_path / "merged")], PROGRAM) == 0
    assert json.loads((tmp_path / "merged" / "training.json").read_text())["rows"] == rows
    assert main(["render", str(tmp_path)], PROGRAM) == 0
    page = (tmp_path / "ground-metric.md").read_text()
    assert "coherent transport" in page
    assert "At the strengths in bold" in page
    assert "Not trained yet: CIFAR-10." in page
    assert (tmp_path / "likelihoods.png").is_file()
    damaged = json.loads((tmp_path / "training.json").read_text())
    damaged["rows"][0]["errors"]["clean"] = 200
    (tmp_path / "training.json").write_text(json.dumps(damaged))
    assert main(["render", str(tmp_path)], PROGRAM) == 2


def row(family: str, eta: float, clean: float, elastic: float, seed: int) -> dict[str, Any]:
    """A network that is wrong on the first images."""
    errors = {"clean": clean, "elastic_1.5": elastic}
    wrong = {
        name: base64.b64encode(np.packbits(np.arange(1000) < 10 * error).tobytes()).decode() for name, error in errors.items()
    }
    held_out = {"errors": {**errors, "rotation_15": clean, "shift_2": clean}}
    found = {"method": f"{family} {eta}", "family": family, "eta": eta, "elastic": 0.0, "seed": seed, "errors": errors}
    common = {"images": dict.fromkeys(errors, 1000), "test_sha256": "the same", "flips": {}, "intervals": {}}
    return {**found, **common, "wrong": wrong, "validation": held_out}


def curve(family: str, etas: tuple[float, ...], above: float) -> list[dict[str, Any]]:
    """Networks of two seeds on a line; the plain network is on those that are not above it."""
    return [row(family, eta, 10 + 5 * eta + 0.1 * seed, 40 - 10 * eta + above, seed) for eta in etas for seed in (0, 1)]


@pytest.mark.parametrize("own", [(0.5, 1.5), (0.5, 1.0, 1.5)], ids=["two strengths", "three strengths"])
def test_points_are_compared_at_equal_clean_error(own: tuple[float, ...]) -> None:
    points = points_of([*curve("none", (0.0,), 0), *curve("a", (1.0, 2.0), 0), *curve("b", own, 4)])
    plain, first, second = ([point for point in points if point.family == name] for name in ("none", "a", "b"))
    uncertainty = Uncertainty.of(points, ("clean", "elastic_1.5"))
    found = difference_at_equal_clean(first, second, [], "elastic_1.5", uncertainty)
    assert found is not None
    assert found.mean == pytest.approx(-4, abs=0.05)
    assert 0 < found.error < 3
    assert chosen([*plain, *first]) == plain[0]
    apart = [Point((row("c", 1.0, 90.0, 95.0, 0),))]
    assert difference_at_equal_clean(first, apart, plain, "elastic_1.5", uncertainty) is None


def test_families_that_share_nothing_but_the_plain_network_do_not_meet() -> None:
    """Their curves cross there by construction, which says nothing about them."""
    plain, better = curve("none", (0.0,), 0), [row("a", 1.0, 8 + 0.1 * seed, 41.0, seed) for seed in (0, 1)]
    points = points_of([*plain, *better, *curve("b", (1.0, 2.0), 0)])
    uncertainty = Uncertainty.of(points, ("clean", "elastic_1.5"))
    none, first, second = ([point for point in points if point.family == name] for name in ("none", "a", "b"))
    assert difference_at_equal_clean(first, second, none, "elastic_1.5", uncertainty) is None
    assert difference_at_equal_clean(second, first, none, "elastic_1.5", uncertainty) is None


def test_one_seed_alone_shows_nothing() -> None:
    points = points_of([row("none", 0.0, 10, 40, 0), row("a", 1.0, 15, 20, 0), row("a", 2.0, 20, 10, 0)])
    found = difference_at_chosen(points[1], points[2], "elastic_1.5", Uncertainty.of(points, ("clean", "elastic_1.5")))
    assert found is not None
    assert found.mean == 10
    assert not found.clear


def small_work(tmp_path: Path, deadline: float = math.inf) -> helping.Work:
    scale = replace(SMALL, images=(12, 8, 6), validation=6)
    where: dict[str, Any] = {"folder": None, "rows": tmp_path / "rows.json", "runs": tmp_path / "runs"}
    return helping.Work(scale=scale, device=torch.device("cpu"), at_once=1, deadline=deadline, **where)


def test_a_network_is_not_begun_without_time(tmp_path: Path) -> None:
    assert list(small_work(tmp_path, deadline=0.0)._one(settings_of("mnist")[0], made_up(), set())) == []
    assert not (tmp_path / "runs").exists()


def test_a_method_that_fails_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", lambda *given: made_up())
    fails = [Setting("mnist", "own:no_such_module:factory,eta=1", 0.0, False, seed) for seed in (0, 1)]
    good = Setting("mnist", "none", 0.0, False, 0)
    work = small_work(tmp_path)
    work.run([*fails, good])
    assert work.missing([*fails, good]) == fails
    assert capsys.readouterr().out.count("failed, and is left out") == 1  # not tried with another seed


def test_a_network_of_another_process_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda *given: made_up())
    taken, free = (Setting("mnist", "none", elastic, False, 0) for elastic in (0.0, 1.0))
    work = small_work(tmp_path)
    run = Run.of(tmp_path / "runs" / taken.study(), taken.config(work.scale, None, 1))
    run.folder.parent.mkdir(parents=True)
    with locked(lock_of(run)):
        work.run([taken, free])
        assert work.missing([taken, free]) == [taken]
    work.run([taken, free])
    assert not work.missing([taken, free])


def test_plans_of_cifar10_allow_a_comparison_at_equal_clean_error() -> None:
    settings = settings_of("cifar10")
    assert len(set(settings)) == len(settings) == 56
    strengths: dict[tuple[str, bool], set[str]] = {}
    for one in settings:
        strengths.setdefault((one.family, one.crops), set()).add(one.method)
    alone = {family for (family, crops), methods in strengths.items() if len(methods) < 2 and not crops}
    assert alone == {"none"}
