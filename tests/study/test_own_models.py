"""A model that was trained elsewhere is measured from the command line as it is: its own weights, its own normalization."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from study.small_studies import stripes_file
from torch import nn

import wassersmooth as ws
from wassersmooth import cli
from wassersmooth.study import data
from wassersmooth.study.config import Data, Model
from wassersmooth.study.models import build
from wassersmooth.study.runs import runs_in

CODE = """
import torch, wassersmooth as ws
from torch import nn

def bare(channels, classes):
    features = nn.Sequential(nn.Conv2d(channels, 4, 3, 2), nn.Softplus(), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(16, classes))

def normalized(channels, classes):
    return ws.Normalized(bare(channels, classes), [0.4] * channels, [0.2] * channels)

def frozen(channels, classes):
    return bare(channels, classes).requires_grad_(False)

def narrow(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3, classes))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "their_models.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("their_models", None)


def trained(factory: str, where: Path) -> nn.Module:
    """A few steps on the stripes, so that its weights are no factory's."""
    import their_models  # type: ignore[import-not-found]

    images = data.load(Data(str(where)))
    torch.manual_seed(5)
    model: nn.Module = getattr(their_models, factory)(images.channels, images.classes)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images.train.images), images.train.labels).backward()
        optimizer.step()
    return model.eval()


def evaluate(*arguments: str) -> int:
    return cli.main(["evaluate", *arguments, "--device", "cpu", "--no-pictures"])


@pytest.mark.parametrize("factory", ["bare", "normalized"])
def test_what_is_measured_is_the_model_as_it_was_trained(here: Path, factory: str) -> None:
    stripes = stripes_file(here)
    model = trained(factory, stripes)
    safetensors.torch.save_file(model.state_dict(), here / "best.safetensors")
    assert (
        evaluate(f"their_models:{factory}", "--weights", "best.safetensors", "--dataset", str(stripes), "--suite", "paper") == 0
    )
    (run,) = runs_in(here / "runs" / "own")
    assert run.name.startswith(f"their_models-{factory}-best-")
    part = data.load(Data(str(stripes))).test
    torch.testing.assert_close(run.load_model()(part.images), model(part.images))
    found = run.evaluation()
    expected = ws.evaluate(model, part.images, part.labels, "paper", seed=found["seed"])
    assert found["errors"] == expected.errors
    assert any("normalized" in name for name in found["errors"]) == (factory == "normalized")
    page = (run.folder / "report.md").read_text()
    assert f"| clean | {expected.errors['clean']:.1f} |" in page


def test_nothing_is_measured_twice_and_nothing_is_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other weights of the same name, and the same ones on other data, have a folder of their own."""
    stripes = stripes_file(here)
    model = trained("bare", stripes)
    for place, factor in (("a", 1.0), ("b", -1.0)):
        (here / place).mkdir()
        changed = {name: factor * tensor for name, tensor in model.state_dict().items()}
        safetensors.torch.save_file(changed, here / place / "best.safetensors")
    other = here / "other.npz"
    other.write_bytes(stripes.read_bytes())

    def measured(place: str, images: Path) -> str:
        """The name that is shown, and what else is said of it."""
        asked = ("--weights", f"{place}/best.safetensors", "--dataset", str(images), "--suite", "quick", "--output", "mine")
        assert evaluate("their_models:bare", *asked) == 0
        return capsys.readouterr().out

    first = measured("a", stripes)
    assert ": measured before" not in first + measured("b", stripes) + measured("a", other)
    runs = runs_in(here / "mine")
    assert len(runs) == 3
    clean = {run.evaluation()["errors"]["clean"] for run in runs}
    assert len(clean) == 2  # of two models
    assert ": measured before" in measured("a", stripes)
    assert len(runs_in(here / "mine")) == 3


@pytest.mark.parametrize("change", ["module.", "_orig_mod.", "half"])
def test_weights_of_wrapped_and_of_halved_models_fit(here: Path, change: str) -> None:
    stripes = stripes_file(here)
    model = trained("bare", stripes).half().float()
    state = {name: tensor.half() for name, tensor in model.state_dict().items()} if change == "half" else model.state_dict()
    prefix = "" if change == "half" else change
    safetensors.torch.save_file({f"{prefix}{name}": tensor for name, tensor in state.items()}, here / "best.safetensors")
    asked = ("--weights", "best.safetensors", "--dataset", str(stripes), "--suite", "quick")
    assert evaluate("their_models:bare", *asked) == 0
    images = torch.rand(2, *data.load(Data(str(stripes))).shape)
    (run,) = runs_in(here / "runs" / "own")
    torch.testing.assert_close(run.load_model()(images), model(images))


def test_what_is_to_be_known_of_the_data_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 2
    images[:, 2:5] = 1
    np.savez(here / "dark.npz", images=images, labels=labels)
    assert evaluate("their_models:bare", "--dataset", "dark.npz", "--suite", "quick") == 0
    shown = capsys.readouterr().out
    assert "dark.npz has no test images: all 40 images are measured" in shown
    assert "nearly black" in shown
    (run,) = runs_in(here / "runs" / "own")
    assert run.evaluation()["images"] == 40
    assert f"page: {run.folder.relative_to(here)}/report.md" in shown
    (run.folder / "evaluation.json").unlink()
    assert evaluate(str(run.folder)) == 0  # as a run, it is measured on all of them too
    assert run.evaluation()["images"] == 40


def test_data_without_test_images_serve_both_ways_in_one_command(here: Path) -> None:
    """A run that was trained here is measured on what it did not see, whatever stands beside it."""
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 8, 8)).astype(np.uint8), np.arange(40) % 2
    np.savez(here / "all.npz", images=images, labels=labels)
    common = ["--dataset", "all.npz", "--regularizers", "none", "--epochs", "1", "--milestones", "--batch-size", "8"]
    assert cli.main(["train", *common, "--validation", str(Data().validation), "--device", "cpu", "--output", "runs/here"]) == 0
    assert evaluate("their_models:bare", "--dataset", "all.npz", "--suite", "quick") == 0
    for run in runs_in(here / "runs" / "own"):
        (run.folder / "evaluation.json").unlink()
    for order in (["runs/own", "runs/here"], ["runs/here", "runs/own"]):
        assert evaluate(*order, "--suite", "quick") == 0
        assert [runs_in(here / place)[0].evaluation()["images"] for place in ("runs/own", "runs/here")] == [40, 8]
        for path in here.glob("runs/*/*/evaluation.json"):
            path.unlink()


@pytest.mark.parametrize("factory", ["bare", "frozen"])
def test_without_weights_they_are_those_of_the_factory(here: Path, factory: str) -> None:
    stripes = stripes_file(here)
    assert evaluate(f"their_models:{factory}", "--dataset", str(stripes), "--suite", "quick") == 0
    assert evaluate("runs/own", "--suite", "quick") == 0  # the folder is one of runs


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["their_models:bare"], "is measured on --dataset; got none"),
        (["their_models:bare", "--dataset", "STRIPES", "--weights", "none.safetensors"], "none.safetensors does not exist"),
        (
            ["their_models:bare", "--dataset", "STRIPES", "--weights", "their_models.py"],
            "expected a safetensors file .no pickle",
        ),
        (
            ["their_models:bare", "--dataset", "STRIPES", "--weights", "other.safetensors"],
            "holds another model: .* differ.*bare was called with channels=1 and classes=3, as many as the data have$",
        ),
        (
            ["their_models:bare", "--dataset", "STRIPES", "--weights", "wrapped.safetensors"],
            "they seem to be of a wassersmooth.Normalized around it",
        ),
        (
            ["their_models:normalized", "--dataset", "STRIPES", "--weights", "colored.safetensors"],
            "normalized was called with channels=1 and classes=3, as many as the data have$",
        ),
        (
            ["their_models", "--dataset", "STRIPES"],
            "a model of your own is written module:factory; .*write their_models:FACTORY",
        ),
        (["their_models.py", "--weights", "x"], "write their_models:FACTORY"),
        (["their_models:bare", "--dataset", "STRIPES", "--image-size", "16"], "--image-size is for a folder of images"),
        (["their_models:narrow", "--dataset", "STRIPES"], "does not take an image of shape"),
        (["their_models:missing", "--dataset", "STRIPES"], "expected module:factory"),
        (["timm:resnet18", "--dataset", "STRIPES"], "timm:resnet18 is built without weights"),
        (["their_models:bare", "their_models:bare", "--dataset", "STRIPES", "--weights", "x"], "belongs to one model; got 2"),
        (["other.safetensors", "--dataset", "STRIPES"], "--dataset belongs to a model of your own"),
        (["other.safetensors"], "evaluate module:factory --weights other.safetensors"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    stripes = stripes_file(here)
    safetensors.torch.save_file({"weight": torch.ones(2)}, here / "other.safetensors")
    wrapped = trained("normalized", stripes).state_dict()
    safetensors.torch.save_file(wrapped, here / "wrapped.safetensors")
    safetensors.torch.save_file(wrapped | {"mean": torch.ones(3, 1, 1)}, here / "colored.safetensors")
    assert evaluate(*(str(stripes) if word == "STRIPES" else word for word in arguments)) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert re.search(complaint, shown)
    assert not (here / "runs").exists()


def test_a_report_is_for_what_was_trained_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("their_models:bare", "--dataset", str(stripes_file(here)), "--suite", "quick") == 0
    assert cli.main(["report", "runs/own"]) == 2
    assert re.search(r"its page is runs/own/their_models-bare-[0-9a-f]{8}/report.md", capsys.readouterr().err)


def test_a_network_may_go_without_the_normalization_of_a_study() -> None:
    whole = build(Model("small"), 1, 3, [0.5], [0.25], seed=0)
    bare = build(Model("small", normalize=False), 1, 3, [0.5], [0.25], seed=0)
    images = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(whole(images), bare((images - 0.5) / 0.25))
