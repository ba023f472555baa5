"""Hugging Face folders on the command line: local, safetensors, no code of theirs. With a stand-in for transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.study.small_studies import stripes_file
from wassersmooth import cli
from wassersmooth.study import data, hf_models
from wassersmooth.study.config import Data
from wassersmooth.study.runs import runs_in


class FakeClassifier(nn.Module):
    """Returns an object with logits, as the models of transformers do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.head = nn.Linear(64, 3)

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(pixel_values.flatten(1)), loss=None)


class FakeAuto:
    """AutoConfig and AutoModelForImageClassification: they record the arguments that matter for safety."""

    asked: ClassVar[list[dict[str, Any]]] = []

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> nn.Module:
        cls.asked.append(options)
        return FakeClassifier(config)

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> Any:
        cls.asked.append(options)
        stored = json.loads((Path(folder) / "config.json").read_text())
        config = SimpleNamespace(id2label={int(k): v for k, v in stored["id2label"].items()})
        if "use_safetensors" not in options:
            return config
        model = FakeClassifier(config)
        weights = Path(folder) / "model.safetensors"
        if not weights.exists():
            raise OSError("no file named model.safetensors found")
        model.load_state_dict(safetensors.torch.load_file(weights))
        return model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fake = SimpleNamespace(AutoConfig=FakeAuto, AutoModelForImageClassification=FakeAuto)
    monkeypatch.setitem(sys.modules, "transformers", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(FakeAuto, "asked", [])
    return tmp_path


def hf_folder(where: Path, names: tuple[str, ...] = ("LABEL_0", "LABEL_1", "LABEL_2"), **preprocessor: Any) -> nn.Module:
    torch.manual_seed(3)
    model = FakeClassifier(None)
    where.mkdir()
    (where / "config.json").write_text(json.dumps({"id2label": dict(enumerate(names))}))
    safetensors.torch.save_file(model.state_dict(), where / "model.safetensors")
    if preprocessor:
        (where / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return model


def evaluate(*arguments: str) -> int:
    return cli.main(["evaluate", *arguments, "--suite", "quick", "--device", "cpu", "--no-pictures"])


def test_a_folder_is_evaluated_with_its_weights_and_its_normalization(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stripes = stripes_file(here)
    model = hf_folder(here / "vit", image_mean=[0.4], image_std=[0.25], do_normalize=True)
    assert evaluate("hf:vit", "--dataset", str(stripes)) == 0
    assert "hf:vit: normalized by mean 0.4, std 0.25, from preprocessor_config.json" in capsys.readouterr().out
    (run,) = runs_in(here / "runs" / "own")  # without trust: no code is named
    assert run.name.startswith("hf-vit-")
    images = data.load(Data(str(stripes))).test.images
    torch.testing.assert_close(run.load_model()(images).logits, model((images - 0.4) / 0.25).logits)
    for options in FakeAuto.asked:
        assert options["trust_remote_code"] is False
        assert options.get("local_files_only", True) is True
        assert options.get("use_safetensors", True) is True
    assert cli.main(["evaluate", str(run.folder), "--suite", "quick", "--no-pictures"]) == 0


@pytest.mark.parametrize("preprocessor", [{}, {"do_normalize": False, "image_mean": [0.4], "image_std": [0.2]}])
def test_without_a_normalization_there_is_one_warning(
    here: Path, capsys: pytest.CaptureFixture[str], preprocessor: dict[str, Any]
) -> None:
    hf_folder(here / "vit", **preprocessor)
    assert evaluate("hf:vit", "--dataset", str(stripes_file(here))) == 0
    assert capsys.readouterr().out.count("warning") == 1


def test_mistakes_are_one_line(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stripes = ("--dataset", str(stripes_file(here)))
    hf_folder(here / "vit", image_mean="gray", image_std=[1])

    def complaint(*arguments: str) -> str:
        assert evaluate(*arguments) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        return shown

    assert "no such folder; models are not downloaded" in complaint("hf:google/vit", *stripes)
    assert "no such folder" in complaint("hf:~nobody-of-this-name/vit", *stripes)
    assert "holds no usable image_mean and image_std" in complaint("hf:vit", *stripes)
    (here / "vit" / "preprocessor_config.json").write_text("[" * 100_000)
    assert "holds no usable image_mean and image_std (ValueError: nested too deeply)" in complaint("hf:vit", *stripes)
    assert "has its weights in its folder; got --weights x.pt" in complaint("hf:vit", "--weights", "x.pt", *stripes)
    (here / "vit" / "model.safetensors").unlink()
    assert "no file named model.safetensors" in complaint("hf:vit", *stripes)
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    assert "needs the package transformers; install it with: pip install transformers" in complaint("hf:vit", *stripes)
    assert not (here / "runs").exists()


def test_names_in_another_order_are_noticed(here: Path) -> None:
    assert hf_models.hf_class_names(hf_folder(here / "a")) == ()
    named = FakeClassifier(SimpleNamespace(id2label={1: "dog", 0: "cat", 2: "eel"}))
    assert hf_models.hf_class_names(named) == ("cat", "dog", "eel")
