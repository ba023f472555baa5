"""No code runs because a file names it: a model ``module:factory`` in a file is refused unless the caller trusts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.study.small_studies import stripes_file
from wassersmooth import cli
from wassersmooth.study import models
from wassersmooth.study.config import Model
from wassersmooth.study.errors import StudyError
from wassersmooth.study.published_models import load_published
from wassersmooth.study.runs import Run

CODE = """
from pathlib import Path
from torch import nn
Path("ran.txt").write_text("this code was run")
def net(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, classes))
"""
TRAINING = ["--dataset", "stripes.npz", "--epochs", "1", "--batch-size", "32", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    stripes_file(tmp_path)
    Path("named_models.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("named_models", None)


def forget() -> None:
    """As in a new process."""
    sys.modules.pop("named_models", None)
    Path("ran.txt").unlink(missing_ok=True)


@pytest.fixture
def trained(here: Path) -> Path:
    """A run whose model was typed, which is consent to run it."""
    assert cli.main(["train", "--model", "named_models:net", *TRAINING, "--output", "typed"]) == 0
    assert Path("ran.txt").exists()
    forget()
    return Path("typed/none-seed0")


def test_certify_asks_too(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["certify", str(trained), "--sigma", "0.2", "--radius", "0", "--samples", "30", "--select", "5"]
    command += ["--test-images", "3", "--device", "cpu"]
    assert cli.main(command) == 2
    assert "named_models" in capsys.readouterr().err
    assert not Path("ran.txt").exists()
    assert cli.main([*command, "--trust-code"]) == 0
    assert Path("ran.txt").exists()


def test_a_run_folder_that_names_code_is_refused_with_the_command(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", str(trained), "--suite", "quick", "--device", "cpu", "--no-pictures"]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    for part in ("config.json names the model named_models:net", "the code of net in the module named_models"):
        assert part in said
    assert f"give {trained} with --trust-code" in said
    assert str(Path.cwd() / "named_models.py") in said
    assert len(said.splitlines()) == 1
    assert not Path("ran.txt").exists()
    assert cli.main([*command, "--trust-code"]) == 0
    assert Path("ran.txt").exists()


def test_loading_from_python_takes_trust_too(trained: Path) -> None:
    with pytest.raises(StudyError, match="trust_code=True"):
        Run.at(trained).load_model()
    with pytest.raises(StudyError, match=r"model.safetensors names the model named_models:net.*trust_code=True"):
        load_published(trained / "model.safetensors")
    assert not Path("ran.txt").exists()
    assert Run.at(trained, trust_code=True).load_model()
    forget()
    assert load_published(trained / "model.safetensors", trust_code=True)
    for load in (Run.at, load_published):
        with pytest.raises(ValueError, match="trust_code must be one of False, True; got 'no'"):
            load(trained, trust_code="no")  # type: ignore[operator]
    assert Path("ran.txt").exists()


def test_a_published_file_that_names_code_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("theirs.safetensors")
    file.write_bytes((trained / "model.safetensors").read_bytes())
    command = ["evaluate", str(file), "--suite", "quick", "--device", "cpu", "--no-pictures"]
    assert cli.main(command) == 2
    assert f"wassersmooth evaluate {file} --trust-code" in capsys.readouterr().err
    assert not Path("ran.txt").exists()
    assert not Path("runs").exists()
    assert cli.main([*command, "--trust-code"]) == 0


@pytest.mark.parametrize("command", ["train", "reproduce", "sweep", "doctor"])
def test_a_configuration_that_names_code_is_refused(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    Path("theirs.toml").write_text('model = "named_models:net"\n')
    assert cli.main([command, "--config", "theirs.toml", *TRAINING]) == 2
    said = capsys.readouterr().err
    assert "theirs.toml names the model named_models:net" in said
    assert "--trust-code" in said
    assert not Path("ran.txt").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize("consent", [["--trust-code"], ["--trust-code", "True"], ["--model", "named_models:net"]])
def test_a_configuration_is_trusted_on_request(here: Path, consent: list[str]) -> None:
    Path("theirs.toml").write_text('model = "named_models:net"\n')
    assert cli.main(["train", "--config", "theirs.toml", *consent, *TRAINING]) == 0
    assert Path("ran.txt").exists()


def test_a_configuration_may_be_overridden_by_a_built_in_model(here: Path) -> None:
    Path("theirs.toml").write_text('model = "named_models:net"\n')
    assert cli.main(["train", "--config", "theirs.toml", "--model", "small", *TRAINING]) == 0
    assert not Path("ran.txt").exists()


def test_bench_asks_for_trust_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.toml").write_text('model = "named_models:net"\ndataset = "stripes.npz"\n')
    assert cli.main(["bench", "--config", "theirs.toml", "--quick", "--only", "step", "--device", "cpu"]) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert not Path("ran.txt").exists()


def test_the_place_of_a_module_is_found_without_importing_it(here: Path) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text('raise SystemExit("imported")')
    with pytest.raises(StudyError, match=r"package/__init__\.py"):
        models.refuse_code(Model("package.inner:net"), Path("config.json"), "say so")
    with pytest.raises(StudyError, match="not found here"):
        models.refuse_code(Model("no_such_module_here:net"), Path("config.json"), "say so")
    for name in ("small", "resnet20", "timm:resnet18"):
        models.refuse_code(Model(name), Path("config.json"), "say so")


@pytest.mark.slow
def test_the_working_directory_does_not_replace_an_installed_module(here: Path) -> None:
    """In a new process, as an installed command starts: without the working directory on the path."""
    Path("colorsys.py").write_text('raise SystemExit("the file of the working directory was imported")')
    program = (
        "import sys; sys.path = [p for p in sys.path if p]\n"
        "from wassersmooth.study import models\n"
        "from wassersmooth.study.config import Model\n"
        "models.build(Model('named_models:net', normalize=False), 1, 3, [0.0], [1.0], 0)\n"
        "import colorsys; print(colorsys.__file__)\n"
    )
    Path("elsewhere").mkdir()
    script = Path("elsewhere/start.py")
    script.write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p and p != str(here))}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert str(here) not in ended.stdout


def test_a_run_of_an_edited_configuration_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "os:system"}))
    assert cli.main(["evaluate", str(trained), "--device", "cpu"]) == 2
    assert "the code of system in the module os" in capsys.readouterr().err
