"""A metric of the user's own on the command line: `own:module:factory,eta=0.3`, with the metric that docs/geometry.md shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import wassersmooth as ws
from tests.study.small_studies import stripes_file
from wassersmooth import cli
from wassersmooth.study.config import RunConfig, Study
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import runs_in

PAGE = (Path(__file__).parents[2] / "docs" / "geometry.md").read_text()
(CODE,) = re.findall(r"```python\n(from wassersmooth.geometry.cometric import Cometric.*?)own = Blurred", PAGE, re.DOTALL)
FACTORIES = """
def blurred(height, width):
    return BlurredEuclidean()

def broken(height, width):
    raise RuntimeError("no metric today")

def nothing(height, width):
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with factories in the working directory."""
    (tmp_path / "my_metrics.py").write_text(f"import torch\nimport wassersmooth as ws\n{CODE}\n{FACTORIES}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_metrics"
    sys.modules.pop("my_metrics", None)


def test_a_regularizer_with_a_metric_of_your_own(module: str) -> None:
    point = Regularizer.parse("own:my_metrics:blurred,eta=0.3")
    assert str(point) == "own:my_metrics:blurred,eta=0.3"
    assert point.slug == "own-my_metrics-blurred-eta0.3"
    images, labels = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    terms = point.objective((4, 4), "double_backward")(model, images, labels)
    expected = ws.GradientPenalty(point.metric(4, 4), 0.3)(model, images, labels)
    assert torch.equal(terms.penalty, expected.penalty)
    assert float(terms.penalty) > 0
    noisy = Regularizer.parse("own-noise:my_metrics:blurred,eta=0.3").objective((4, 4), "double_backward")
    assert isinstance(noisy, ws.NoisyInputs)
    both = Regularizer.parse("own+pgd7:my_metrics:blurred,eta=0.3,epsilon=8/255")
    assert isinstance(both.objective((4, 4), "double_backward"), ws.AdversarialTraining)
    (config,) = Study(regularizers=("own:my_metrics:blurred,eta=0.3",)).runs("digits")
    assert RunConfig.from_flat(config.to_flat(), "here").regularizer == point


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("own:eta=0.3", "write own:module:factory,eta=0.3"),
        ("own:my_metrics,eta=0.3", "write own:module:factory,eta=0.3"),
        ("own:my_metrics:blurred", "eta must be positive.*; write for example own:my_metrics:blurred,eta=0.3$"),
        ("wasserstein:radius=2", "write for example wasserstein:eta=0.3,radius=2$"),
        ("own:my_metrics:blurred,eta=1,radius=2", "leave them out"),
        ("euclidean:my_metrics:blurred,eta=1", "KIND:eta=NUMBER"),
    ],
)
def test_a_metric_that_is_not_named_right_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(StudyError, match=complaint):
        Regularizer.parse(text)


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        ("my_metrics:missing", "has no attribute.*expected module:factory, importable from here"),
        ("no_such_module:blurred", "No module named"),
        (
            "my_metrics:broken",
            r"the factory failed \(RuntimeError: no metric today\); it is called as factory\(height, width\)",
        ),
        ("my_metrics:nothing", r"the factory returned int; expected a metric, with cometric\(x\)"),
    ],
)
def test_a_factory_that_fails_is_named(module: str, factory: str, complaint: str) -> None:
    with pytest.raises(StudyError, match=complaint):
        Regularizer.parse(f"own:{factory},eta=0.3").metric(4, 4)


def test_training_and_evaluation_from_the_command_line(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--dataset {stripes_file(tmp_path)} --epochs 1 --batch-size 16 --validation 0.25 --device cpu --threads 1"
    flags += " --output study --elastic 0.5"
    assert cli.main(["train", *flags.split(), "--regularizers", "own:my_metrics:blurred,eta=0.3"]) == 0
    (run,) = runs_in(tmp_path / "study")
    assert run.folder.name == "own-my_metrics-blurred-eta0.3-seed0"
    stored = json.loads((run.folder / "config.json").read_text())
    assert (stored["regularizer"], stored["factory"], stored["elastic"]) == ("own", "my_metrics:blurred", 0.5)
    assert run.metrics()[0]["penalty"] > 0
    assert cli.main(["evaluate", "study", "--suite", "quick", "--test-images", "8", "--device", "cpu"]) == 0  # needs no metric
    capsys.readouterr()
    (tmp_path / "own.toml").write_text('regularizers = ["own:my_metrics:blurred,eta=0.3"]\n')
    command = ["train", "--config", "own.toml", *flags.replace("study", "other").split()]
    assert cli.main(command) == 2
    assert "names the metric my_metrics:blurred, so training would run its code" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert cli.main([*command, "--trust-code", "True"]) == 0
