"""Published networks by name: the right bytes, or one line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from wassersmooth.study import published_models
from wassersmooth.study.errors import StudyError
from wassersmooth.study.published_models import FOLDER, PUBLISHED, load_published

ROOT = Path(__file__).parent.parent.parent
MODELS = ROOT / FOLDER


def test_the_hashes_are_those_of_the_published_index() -> None:
    index = json.loads((MODELS / "models.json").read_text())["models"]
    assert {f"{name}.safetensors": known for name, known in PUBLISHED.items()} == {
        name: entry["sha256"] for name, entry in index.items()
    }


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_network_is_loaded_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (MODELS / f"{name}.safetensors").is_file():
        pytest.skip("an sdist has no weights")
    monkeypatch.chdir(tmp_path)  # found from the package, wherever the work is
    model, same = load_published(name), load_published(MODELS / f"{name}.safetensors")
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert not model.training
    assert torch.equal(model(images), same(images))
    assert hashlib.sha256((MODELS / f"{name}.safetensors").read_bytes()).hexdigest() == PUBLISHED[name]


def test_other_bytes_under_a_published_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory goes before the checkout of the package."""
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir(parents=True)
    (FOLDER / "none.safetensors").write_bytes(b"other bytes")
    with pytest.raises(
        StudyError, match=r"none\.safetensors is not the published network none: expected SHA-256 ae52.*; restore"
    ):
        load_published("none")


def test_an_installed_package_says_where_the_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published_models, "CHECKOUT", tmp_path)
    with pytest.raises(
        StudyError, match=r"the published network none is not installed with the package; expected results.*check"
    ):
        load_published("none")


def test_a_misspelled_name() -> None:
    with pytest.raises(StudyError, match=r"is none, euclidean, wasserstein, or the path of a file; got 'wasserstien'; did you"):
        load_published("wasserstien")
