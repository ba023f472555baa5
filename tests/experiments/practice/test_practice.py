"""The experiment on a few made-up images: the plan, every command, choices by aims, and suggestions beside a search."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.practice import commands, page, stored_rows, suggestions
from experiments.practice.choosing import AIMS, chosen, chosen_rows, families, plain_of, points_of
from experiments.practice.commands import PROGRAM
from experiments.practice.plans import FULL, SMALL, Setting, settings_of, with_eta
from experiments.practice.work import Work, suggestion
from wassersmooth.cli import main
from wassersmooth.robustness.attacks import FGSM
from wassersmooth.study import data
from wassersmooth.study.data import Dataset, Part
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import locked


def made_up() -> Dataset:
    """Two classes of stripes, as a data set of ten."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    wave = torch.sin(torch.arange(28) / 3.0)
    images = 0.4 + 0.3 * torch.where(labels[:, None, None, None] == 0, wave[:, None], wave).expand(40, 1, 28, 28)
    images = images + 0.1 * torch.rand(40, 1, 28, 28, generator=random)
    part = Part(images, labels)
    return Dataset(part, Part(images[:12], labels[:12]), Part(images[:8], labels[:8]), 10, "made up")


def row(family: str, eta: float, seed: int = 0, suggested_for: float | None = None, **errors: float) -> dict[str, Any]:
    """A network whose validation errors are its test errors."""
    kind = {"none": "none", "Euclidean": "euclidean", "dual norm": "dual-norm"}[family]
    regularizer = with_eta(kind, eta) if eta else kind
    found = {"table": "mnist-1000", "regularizer": regularizer, "seed": seed, "suggested_for": suggested_for}
    found |= {"family": family, "kind": kind, "eta": eta, "errors": errors, "validation": {"errors": errors}}
    origin = {"hardware": "a <machine>", "versions": {"torch": "2"}, "commit": "0" * 40}
    found |= {"images": dict.fromkeys(errors, 100), "intervals": {}, "flips": 1.0, "epoch_seconds": 1.0 + eta}
    return found | {"peak_bytes": None, "origin": origin, "command": "train"}


ROWS = [
    *(row("none", 0.0, seed, clean=8.0 + seed, near=30.0, far=95.0) for seed in (0, 1)),
    *(row("Euclidean", 0.3, seed, clean=6.0, near=15.0, far=80.0) for seed in (0, 1)),
    *(row("Euclidean", 1.0, seed, clean=9.0, near=12.0, far=50.0) for seed in (0, 1)),
    *(row("Euclidean", 3.0, seed, clean=20.0, near=25.0, far=40.0) for seed in (0, 1)),
    row("dual norm", 1.0, clean=30.0, near=31.0, far=45.0),
    row("Euclidean", 2.0, suggested_for=0.1, clean=12.0, near=14.0, far=43.0),
]


def test_every_network_of_the_plan_is_one_that_a_study_can_train() -> None:
    for name, table in FULL.tables.items():
        settings = settings_of(name, FULL)
        assert len({tuple(setting.key.values()) for setting in settings}) == len(settings)
        for setting in settings:
            assert str(Regularizer.parse(setting.regularizer)) == setting.regularizer
            assert setting.point.kind in page.LINES
        assert {setting.regularizer for setting in settings} >= {"none", with_eta("euclidean", table.families["euclidean"][0])}
        assert settings[0].regularizer == "none"
    of_second_seed = {setting.point.kind for setting in settings_of("cifar10", FULL) if setting.seed == 1}
    assert "pgd7" not in of_second_seed
    assert {"none", "adversarial", "wasserstein"} <= of_second_seed
    config = Setting("cifar10", "none", 0).config(FULL, None, "tf32")
    assert (config.data.augment, config.training.epochs, config.model.activation) == (True, 30, "silu")
    assert (50_000 - round(config.data.validation * 50_000)) % config.training.batch_size == 0


def test_strengths_are_chosen_on_validation_images_for_each_aim() -> None:
    rows = [{**one, "errors": dict.fromkeys(one["errors"], 50.0)} for one in ROWS]  # test errors do not matter
    points = points_of(rows)
    plain = plain_of(points)
    assert plain is not None
    euclidean = families(points)["Euclidean"]
    found = [chosen(euclidean, plain, aim) for aim in AIMS]
    assert [point and point.eta for point in found] == [0.3, 1.0, 3.0]
    assert chosen(families(points)["dual norm"], plain, "one_point") is None
    assert not any(one["suggested_for"] for one in chosen_rows(rows))
    assert {(one["regularizer"], one["seed"]) for one in chosen_rows(rows) if one["seed"] == 1} == {
        *(("none", 1), ("euclidean:eta=0.3", 1), ("euclidean:eta=1", 1), ("euclidean:eta=3", 1))
    }
    assert chosen_rows(rows[2:]) == []  # without a plain network nothing can be chosen


def test_a_suggestion_is_compared_with_the_search_over_the_same_seeds() -> None:
    (found,) = suggestions.trained(ROWS, "here", near=0.03)
    assert (found.suggested, found.searched, found.edge) == (2.0, 3.0, True)
    assert found.lost == (-8.0, 3.0)


def test_errors_between_strengths_are_linear_in_the_logarithm(tmp_path: Path) -> None:
    settings = {"activation": "softplus", "epochs": 24, "augment": False, "patience": None}
    measures = [f"pgd20_margin_{level}_pixel" for level in suggestions.LEVELS]
    rows = []
    for eta, clean, robust in ((0.1, 10.0, 60.0), (1.0, 20.0, 40.0), (10.0, 60.0, 70.0)):
        errors = {"clean": clean} | dict.fromkeys(measures, robust)
        rows.append({"regularizer": f"euclidean:eta={eta:g}", "eta": eta, "errors": errors, "validation": {"errors": errors}})
    (tmp_path / "frontier.json").write_text(json.dumps({"rows": [{**one, **settings} for one in rows]}))
    suggested = {"family": "euclidean", "before": 10**-0.5 / 2, "after": 1.0, "origin": {"hardware": "here"}}
    (tmp_path / "suggested.json").write_text(json.dumps({"rows": [suggested, {**suggested, "family": "dual-norm"}]}))
    near, far = suggestions.on_frontier(tmp_path / "suggested.json", tmp_path / "frontier.json")
    assert near.suggested == pytest.approx(10**-0.5)
    assert near.clean == pytest.approx((15.0, 20.0))
    assert near.robust == pytest.approx((50.0, 40.0))
    assert not near.outside
    assert not near.edge
    outside = replace(near, outside=True, robust=(0.0, 99.0))
    assert suggestions.summary([near, outside])["robust"] == pytest.approx(10.0)
    assert far.attack == "L-infinity 8/255"


def test_the_page_says_what_is_missing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "practice.json").write_text(json.dumps({"rows": ROWS}))
    assert main(["render", str(tmp_path)], PROGRAM) == 0
    text = (tmp_path / "practice.md").read_text()
    assert "Not trained yet: CIFAR-10, ResNet-18" in text
    assert "| at most one point of clean error lost | Euclidean | 9.0 ± 0.0 |" in text
    assert "`ws.GradientPenalty(ws.Euclidean(), 1)`" in text
    assert "2.5 points lower on test images (2 seeds): every seed is better" in " ".join(text.split())
    assert "How good suggested strengths are" in text
    assert "one took up to 3.1 times as long as another" in " ".join(text.split())  # epochs of 1 + eta seconds
    assert "AutoAttack" not in text
    assert "<machine>" not in text
    assert (tmp_path / "practice.png").is_file()
    damaged = [{**ROWS[0], "errors": {"clean": 200.0}}, *ROWS[1:]]
    (tmp_path / "practice.json").write_text(json.dumps({"rows": damaged}))
    assert main(["render", str(tmp_path)], PROGRAM) == 2


def test_train_attack_merge_and_render(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", lambda *given: made_up())
    tiny = replace(SMALL.tables["mnist-1000"], families={"euclidean": (0.7,)})
    monkeypatch.setattr(
        commands, "SMALL", replace(SMALL, tables={"mnist-1000": tiny}, images=(8, 4), validation=4, autoattack=2)
    )
    flags = ["--small", "--tables", "mnist-1000", "--device", "cpu", "--precision", "float32"]
    flags += ["--output", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main(["train", *flags, "--seconds", "0"], PROGRAM) == 0
    assert "out of time; the same command continues" in capsys.readouterr().out
    assert main(["train", *flags, "--seeds", "0"], PROGRAM) == 0
    rows = stored_rows.read(tmp_path / "practice.json")
    assert [one["regularizer"] for one in rows if one["suggested_for"] is None] == ["euclidean:eta=0.7", "none"]
    expected = {suggestion("euclidean", made_up(), tiny.model, 0, epsilon) for epsilon in (tiny.sizes.near, tiny.sizes.far)}
    assert {one["eta"] for one in rows if one["suggested_for"] is not None} == expected
    assert main(["train", *flags, "--seeds", "0"], PROGRAM) == 0  # nothing is left to do
    assert "all rows are there" in capsys.readouterr().out
    monkeypatch.setattr("experiments.practice.measuring.AutoAttack", FGSM)  # quick
    other = next(tmp_path.glob("runs/*/none*/model.safetensors")).parent
    with locked(other.with_name(f"{other.name}.lock")):  # attacked by another process
        assert main(["attack", *flags], PROGRAM) == 0
        assert "some chosen networks are not attacked" in capsys.readouterr().out
    assert main(["attack", *flags], PROGRAM) == 0
    assert "all chosen networks are attacked" in capsys.readouterr().out
    rows = stored_rows.read(tmp_path / "practice.json")
    assert all(("autoattack_far" in one["errors"]) == (one["suggested_for"] is None) for one in rows)
    assert main(["merge", str(tmp_path / "practice.json"), "--output", str(tmp_path / "merged")], PROGRAM) == 0
    assert stored_rows.read(tmp_path / "merged" / "practice.json") == rows
    assert main(["render", str(tmp_path)], PROGRAM) == 0
    assert "AutoAttack 0.1" in (tmp_path / "practice.md").read_text()


def test_a_network_is_not_begun_that_would_not_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    rest = {"folder": None, "rows": tmp_path / "rows.json", "runs": tmp_path / "runs", "device": torch.device("cpu")}
    deadline = time.perf_counter() + 100
    work = Work(name="mnist-1000", scale=SMALL, precision="float32", command="", deadline=deadline, **rest)  # type: ignore[arg-type]
    monkeypatch.setattr(work, "_trained", lambda setting, *given: iter(begun.append(setting.regularizer) or ()))
    work.paces = [9.0]  # seconds for each sweep
    for regularizer in ("pgd7:eta=0.1", "adversarial:eta=0.1"):
        work._one(Setting("mnist-1000", regularizer, 0))
    assert begun == ["adversarial:eta=0.1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--tables", "imagenet"], "tables must be among cifar10"),
        (["merge"], "merge needs files of rows"),
        (["render", "nowhere"], "render needs the rows of train"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words, PROGRAM) == 2
    assert said in " ".join(capsys.readouterr().err.split())
