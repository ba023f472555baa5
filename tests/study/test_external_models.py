"""A model that was trained elsewhere is evaluated from the command line with its own weights and normalization."""

from __future__ import annotations

import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import wassersmooth as ws
from tests.study.small_studies import stripes_file
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
    """A few steps on the stripes, so that its weights differ from the factory's."""
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


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["bare", "normalized"])
def test_the_model_is_evaluated_as_it_was_trained(here: Path, factory: str) -> None:
    stripes = stripes_file(here)
    model = trained(factory, stripes)
    safetensors.torch.save_file(model.state_dict(), here / "best.safetensors")
    assert (
        evaluate(f"their_models:{factory}", "--weights", "best.safetensors", "--dataset", str(stripes), "--suite", "paper") == 0
    )
    (run,) = runs_in(here / "runs" / "own", trust_code=True)
    assert run.name.startswith(f"their_models-{factory}-best-")
    part = data.load(Data(str(stripes))).test
    torch.testing.assert_close(run.load_model()(part.images), model(part.images))
    found = run.evaluation()
    expected = ws.evaluate(model, part.images, part.labels, "paper", seed=found["seed"])
    assert found["errors"] == expected.errors
    assert any("normalized" in name for name in found["errors"]) == (factory == "normalized")
    page = (run.folder / "report.md").read_text()
    assert f"| clean | {expected.errors['clean']:.1f} |" in page


def test_nothing_is_evaluated_twice_and_nothing_is_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other weights of the same name, and the same ones on other data, have separate folders."""
    stripes = stripes_file(here)
    model = trained("bare", stripes)
    for place, factor in (("a", 1.0), ("b", -1.0)):
        (here / place).mkdir()
        changed = {name: factor * tensor for name, tensor in model.state_dict().items()}
        safetensors.torch.save_file(changed, here / place / "best.safetensors")
    other = here / "other.npz"
    other.write_bytes(stripes.read_bytes())

    def measured(place: str, images: Path) -> str:
        """The name that is shown, and the rest of its line."""
        asked = ("--weights", f"{place}/best.safetensors", "--dataset", str(images), "--suite", "quick", "--output", "mine")
        assert evaluate("their_models:bare", *asked) == 0
        return capsys.readouterr().out

    first = measured("a", stripes)
    assert ": already measured" not in first + measured("b", stripes) + measured("a", other)
    runs = runs_in(here / "mine")
    assert len(runs) == 3
    clean = {run.evaluation()["errors"]["clean"] for run in runs}
    assert len(clean) == 2  # of two models
    assert ": already measured" in measured("a", stripes)
    assert len(runs_in(here / "mine")) == 3


@pytest.mark.parametrize("change", ["module.", "_orig_mod.", "half"])
def test_weights_of_wrapped_and_half_precision_models_fit(here: Path, change: str) -> None:
    stripes = stripes_file(here)
    model = trained("bare", stripes).half().float()
    state = {name: tensor.half() for name, tensor in model.state_dict().items()} if change == "half" else model.state_dict()
    prefix = "" if change == "half" else change
    safetensors.torch.save_file({f"{prefix}{name}": tensor for name, tensor in state.items()}, here / "best.safetensors")
    asked = ("--weights", "best.safetensors", "--dataset", str(stripes), "--suite", "quick")
    assert evaluate("their_models:bare", *asked) == 0
    images = torch.rand(2, *data.load(Data(str(stripes))).shape)
    (run,) = runs_in(here / "runs" / "own", trust_code=True)
    torch.testing.assert_close(run.load_model()(images), model(images))


def test_remarks_on_the_data_are_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 2
    images[:, 2:5] = 1
    np.savez(here / "dark.npz", images=images, labels=labels)
    assert evaluate("their_models:bare", "--dataset", "dark.npz", "--suite", "quick") == 0
    shown = capsys.readouterr().out
    assert "dark.npz has no test images: all 40 images are measured" in shown
    assert "nearly black" in shown
    (run,) = runs_in(here / "runs" / "own", trust_code=True)
    assert run.evaluation()["images"] == 40
    assert f"page: {run.folder.relative_to(here)}/report.html" in shown
    (run.folder / "evaluation.json").unlink()
    assert evaluate(str(run.folder), "--trust-code") == 0  # also all of them when given as a run
    assert run.evaluation()["images"] == 40


def test_one_command_uses_data_without_test_images_for_both_kinds_of_runs(here: Path) -> None:
    """A run that was trained here is evaluated on images it was not trained on, whatever else the command evaluates."""
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 8, 8)).astype(np.uint8), np.arange(40) % 2
    np.savez(here / "all.npz", images=images, labels=labels)
    common = ["--dataset", "all.npz", "--regularizers", "none", "--epochs", "1", "--milestones", "--batch-size", "8"]
    assert cli.main(["train", *common, "--validation", str(Data().validation), "--device", "cpu", "--output", "runs/here"]) == 0
    assert evaluate("their_models:bare", "--dataset", "all.npz", "--suite", "quick") == 0
    for run in runs_in(here / "runs" / "own"):
        (run.folder / "evaluation.json").unlink()
    for order in (["runs/own", "runs/here"], ["runs/here", "runs/own"]):
        assert evaluate(*order, "--suite", "quick", "--trust-code") == 0
        assert [runs_in(here / place)[0].evaluation()["images"] for place in ("runs/own", "runs/here")] == [40, 8]
        for path in here.glob("runs/*/*/evaluation.json"):
            path.unlink()


@pytest.mark.parametrize("factory", ["bare", "frozen"])
def test_without_a_file_the_weights_come_from_the_factory(here: Path, factory: str) -> None:
    stripes = stripes_file(here)
    assert evaluate(f"their_models:{factory}", "--dataset", str(stripes), "--suite", "quick") == 0
    assert evaluate("runs/own", "--suite", "quick", "--trust-code") == 0  # the folder is one of runs


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["their_models:bare"], "needs --dataset; got none"),
        (["their_models:bare", "--dataset", "STRIPES", "--weights", "none.safetensors"], "none.safetensors does not exist"),
        (
            ["their_models:bare", "--dataset", "STRIPES", "--weights", "their_models.py"],
            "cannot be read as a state dict .it is neither.; expected safetensors, or what torch.save",
        ),
        (
            ["their_models:bare", "--dataset", "STRIPES", "--weights", "other.safetensors"],
            r"holds another model: .* \(none in the file, \(4,\) of torch.float32 in the model\); "
            "their_models:bare was called with channels=1 and classes=3, as many as the data have$",
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
        (["their_models:narrow", "--dataset", "STRIPES"], "does not take an image of shape.*to the model by --image-size"),
        (
            ["their_models:bare", "--dataset", "STRIPES", "--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"],
            "--mean and --std take one number for each of the 1 channels of the data; got 3 and 3",
        ),
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


def test_a_report_needs_a_run_that_was_trained_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("their_models:bare", "--dataset", str(stripes_file(here)), "--suite", "quick") == 0
    assert cli.main(["report", "runs/own"]) == 2
    assert re.search(r"its page is runs/own/their_models-bare-[0-9a-f]{8}/report.html", capsys.readouterr().err)


def test_a_network_may_be_trained_without_normalization() -> None:
    whole = build(Model("small"), 1, 3, [0.5], [0.25], seed=0)
    bare = build(Model("small", normalize=False), 1, 3, [0.5], [0.25], seed=0)
    images = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(whole(images), bare((images - 0.5) / 0.25))


TIMM = """
from torch import nn
__version__ = "fake"
def is_model(name): return name == "net"
def create_model(name, pretrained, in_chans, num_classes):
    assert not pretrained
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * in_chans, num_classes))
    model.pretrained_cfg = {"mean": (0.25,) * in_chans, "std": (0.5,) * in_chans}
    return model
"""


def evaluated(here: Path) -> nn.Module:
    """The model of the only run, as it is evaluated."""
    (run,) = runs_in(here / "runs" / "own", trust_code=True)
    assert (run.folder / "evaluation.json").is_file()
    return run.load_model()


@pytest.mark.parametrize("nested", ["", "state_dict", "model"])
def test_a_state_dict_by_torch_save(here: Path, nested: str) -> None:
    stripes = stripes_file(here)
    model = trained("bare", stripes)
    weights: dict[str, object] = dict(model.state_dict())
    torch.save({nested: weights, "epoch": 7, "optimizer": {"lr": 0.1}} if nested else weights, here / "net.pt")
    assert evaluate("their_models:bare", "--weights", "net.pt", "--dataset", str(stripes), "--suite", "quick") == 0
    images = data.load(Data(str(stripes))).test.images
    torch.testing.assert_close(evaluated(here)(images), model(images))


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("open('ran', 'w').close()",))


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stripes = stripes_file(here)
    torch.save({"weight": Payload()}, here / "net.pt")
    assert evaluate("their_models:bare", "--weights", "net.pt", "--dataset", str(stripes)) == 2
    assert "exec); expected safetensors" in capsys.readouterr().err
    (here / "net.pt").write_bytes(pickle.dumps(Payload(), 4))  # torch warns about the protocol
    with warnings.catch_warnings(action="error"):
        assert evaluate("their_models:bare", "--weights", "net.pt", "--dataset", str(stripes)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    torch.save({"epoch": 3}, here / "net.pt")
    assert evaluate("their_models:bare", "--weights", "net.pt", "--dataset", str(stripes)) == 2
    assert "holds no state dict; got a dictionary with epoch" in capsys.readouterr().err
    assert not (here / "ran").exists()
    assert not (here / "runs").exists()


def test_the_normalization_of_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stripes = stripes_file(here)
    model = trained("bare", stripes)
    torch.save(model.state_dict(), here / "net.pt")
    own = ("their_models:bare", "--weights", "net.pt", "--dataset", str(stripes), "--suite", "quick")
    assert evaluate(*own, "--mean", "0.3") == 2
    assert "--mean and --std belong together; got --mean alone" in capsys.readouterr().err
    assert evaluate(*own, "--mean", "130", "--std", "60") == 2
    assert "--mean and --std: mean must be in [0, 1]" in capsys.readouterr().err
    assert evaluate("their_models:normalized", *own[3:], "--mean", "0.3", "--std", "0.2") == 2
    assert "has a wassersmooth.Normalized inside; got --mean" in capsys.readouterr().err
    assert evaluate(*own, "--mean", "0.3", "--std", "0.2") == 0
    assert "warning" not in capsys.readouterr().out
    images = data.load(Data(str(stripes))).test.images
    torch.testing.assert_close(evaluated(here)(images), model((images - 0.3) / 0.2))
    (page,) = (here / "runs" / "own").glob("*/report.html")
    assert f"{len(images)} images of {stripes.name} ·" in page.read_text()
    assert f"<title>{own[0]}: robustness</title>" in page.read_text()
    assert not (page.parent / "exhibits.safetensors").exists(), "pictures are for the page of a study, which it has not"


def test_one_warning_where_no_normalization_is_known(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stripes = stripes_file(here)
    assert evaluate("their_models:normalized", "--dataset", str(stripes), "--suite", "quick") == 0
    assert "warning" not in capsys.readouterr().out
    assert evaluate("their_models:bare", "--dataset", str(stripes), "--suite", "quick") == 0
    assert capsys.readouterr().out.count("warning: their_models:bare is taken to expect images in [0, 1] as they are") == 1


def test_timm_with_its_own_normalization(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the package, which is not needed to develop this one."""
    stripes = stripes_file(here)
    (here / "timm.py").write_text(TIMM)
    monkeypatch.setitem(sys.modules, "timm", None)  # afterwards, whatever is imported here is forgotten
    del sys.modules["timm"]
    import timm  # type: ignore[import-not-found]

    model = timm.create_model("net", pretrained=False, in_chans=1, num_classes=3)
    torch.save(model.state_dict(), here / "net.pt")
    assert evaluate("timm:net", "--weights", "net.pt", "--dataset", str(stripes), "--suite", "quick") == 0
    assert "timm:net: normalized by mean 0.25, std 0.5, from timm's pretrained_cfg" in capsys.readouterr().out
    images = data.load(Data(str(stripes))).test.images
    torch.testing.assert_close(evaluated(here)(images), model((images - 0.25) / 0.5))
