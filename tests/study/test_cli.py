"""The command line: a manual, values from preset, file and flags, and one clear line with exit code 2 on bad input."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import tyro

from tests.study.small_studies import stripes_file
from wassersmooth import cli
from wassersmooth.study import manual, presets
from wassersmooth.study.commands import COMMANDS, Reproduce, StudyCommand, Sweep, Train
from wassersmooth.study.config import flatten


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def tiny_flags(folder: Path) -> list[str]:
    flags = f"--dataset {stripes_file(folder)} --epochs 2 --batch-size 16 --validation 0.25 --device cpu --threads 1"
    return [*flags.split(), "--output", str(folder / "study")]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_all_of_them_are_shown(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """40 lines of 80 columns, with an example at the bottom."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, *filter(None, [name]), "--help")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: wassersmooth {name or 'COMMAND'}")
    if name:
        assert f"\nexamples:\n  wassersmooth {name}" in out
        assert "\n  --help-all " in out
        assert summary_of(COMMANDS[name]) in " ".join(out.split())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_all_has_every_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The options are those that the parser itself knows; those of --help are among them."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        tyro.cli(COMMANDS[name], args=["--help"], config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    parsed = set(re.findall(r"^[│| ] {1,2}(--\w[\w-]*)", plain, re.MULTILINE))
    _, out, _ = run(capsys, name, "--help-all")
    shown = set(re.findall(r"^  (--[\w-]+)", out, re.MULTILINE))
    assert shown == parsed
    assert max(map(len, out.splitlines())) <= 80
    assert summary_of(COMMANDS[name]) in " ".join(out.split())
    common = [option for option in manual.options_of(COMMANDS[name]) if option.name in getattr(COMMANDS[name], "common", ())]
    assert len(common) == len(getattr(COMMANDS[name], "common", ()))
    _, short, _ = run(capsys, name, "--help")
    assert set(re.findall(r"^  (--[\w-]+)", short, re.MULTILINE)) <= shown | {"--help-all"}
    if issubclass(COMMANDS[name], StudyCommand):
        assert {f"--{field.replace('_', '-')}" for field in flatten(COMMANDS[name]())} <= shown


def test_help_needs_no_wide_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "9")
    for words in (["--help"], ["train", "--help"], ["train", "--help-all"]):
        assert run(capsys, *words)[0] == 0


def summary_of(command: type) -> str:
    return " ".join(str(command.__doc__).partition("\n\n")[0].split())


def test_the_manual_shows_the_values_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    epochs = presets.with_preset(Train(), "cifar10-paper").training.epochs
    assert (
        f"Passes over the training images. (default: {epochs})"
        in run(capsys, "train", "--preset", "cifar10-paper", "--help")[1]
    )


def test_without_its_source_a_command_has_its_options_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(of: object) -> str:
        raise OSError("source code not available")

    monkeypatch.setattr(manual.inspect, "getsource", no_source)
    assert {option.flag for option in manual.options_of(Train)} >= {"--epochs", "--preset"}
    assert "--epochs INT" in manual.short_manual("wassersmooth train", Train)


def test_a_misspelled_key_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("epoch = 3\n")
    code, _, err = run(capsys, "train", "--config", str(tmp_path / "mine.toml"))
    assert code == 2
    assert re.search(r"mine\.toml: unknown 'epoch'; known are .*; did you mean epochs\?$", err.strip())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--augment"], True),
        (["--no-augment"], False),
        (["--augment", "--no-augment"], False),
        (["--augment", "True"], True),
        (["--augment=False"], False),
        ([], False),
    ],
)
def test_booleans_have_one_style(words: list[str], expected: bool) -> None:
    parsed = cli.parse(["train", *words, "--epochs", "3"])
    assert isinstance(parsed, Train)
    assert (parsed.data.augment, parsed.training.epochs) == (expected, 3)


def test_booleans_that_may_be_left_open() -> None:
    for words, expected in (([], None), (["--compile"], True), (["--no-compile"], False)):
        assert cli.parse(["train", *words]).machine.compile is expected  # type: ignore[attr-defined]
        assert cli.parse(["bench", *words]).compile is expected  # type: ignore[attr-defined]
    parsed = cli.parse(["evaluate", "--remeasure", "runs/digits", "--no-pictures"])
    assert (parsed.remeasure, parsed.folders, parsed.pictures) == (True, (Path("runs/digits"),), False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fly"], "the command must be one of reproduce, train, .* got 'fly'"),
        (["train", "--preset", "imagenet"], "preset must be one of cifar10-paper, .* got 'imagenet'"),
        (["train", "--preset", "digit"], "got 'digit'; did you mean digits\\?"),
        (["train", "--preset", "zebra"], "got 'zebra'; give your own file with --config"),
        (["train", "--epochs", "many"], "Error parsing --epochs"),
        (["train", "--epochs", "0"], "epochs must be at least 1; got 0"),
        (["train", "--batch-size", "9" * 20], r"batch_size must be below 2\^63; got 9{20}"),
        (["train", "--milestones", "1", "9" * 20], r"milestones must be below 2\^63; got"),
        (["train", "--threads", "100000"], "threads must be at most 1024, or left out; got 100000"),
        (["bench", "--threads", "0"], "threads must be at least 1, or left out; got 0"),
        (["bench", "--threads", "100000"], "threads must be at most 1024, or left out; got 100000"),
        (["trian"], r"got 'trian'; did you mean train\?"),
        (["train", "--epoch", "3"], r"wassersmooth train has no option --epoch; did you mean --epochs\?; see"),
        (["train", "--no-agument"], r"has no option --no-agument; did you mean --no-augment\?"),
        (
            ["train", "--zebra=secret"],
            "wassersmooth train has no option --zebra; check its name; see wassersmooth train --help-all",
        ),
        (["train", "--suite", "standrad"], r"--suite must be one of quick, .*; got 'standrad'; did you mean standard\?"),
        (["evaluate", "nowhere", "--suite", "papper"], r"--suite must be one of .*; got 'papper'; did you mean paper\?"),
        (["train", "--dataset", "cifar01"], r"dataset must be one of .*; did you mean cifar10\?"),
        (["train", "--regularizers", "wasserstien:eta=1"], r"got 'wasserstien'; did you mean wasserstein\?"),
        (["train", "--regularizers", "euclidian+pgd:eta=1,epsilon=1"], r"did you mean euclidean\+pgd7\?"),
        (["train", "--model", "resnet2"], r"model must be small, .*; got 'resnet2'; did you mean resnet20\?"),
        (["train", "--learning-rate"], "--learning-rate"),
        (["train", "--activation", "tanh"], "--activation"),
        (["train", "--seeds"], "seeds must be one or more"),
        (["train", "--config", "nowhere.toml"], r"nowhere\.toml does not exist"),
        (["train", "--regularizers", "euclidean"], "eta must be positive"),
        (["train", "--dataset", "nothing"], "dataset must be one of"),
        (["train", "--device", "tpu"], "device must be auto, cpu, cuda"),
        (["train", "--model", "vgg"], "model must be small, resnet20"),
        (["evaluate"], "evaluate needs the folder"),
        (["evaluate", "nowhere"], "nowhere does not exist; expected a run, a study folder"),
        (["evaluate", "nowhere", "--suite", "huge"], "--suite must be one of quick, paper, .*full; got 'huge'"),
        (["train", "--dataset", "nowhere.npz"], r"nowhere\.npz does not exist"),
        (["report"], "Missing.*FOLDER"),
        (["report", "nowhere"], "nowhere does not exist; expected a run, a study folder"),
        (["bench", "--repeats", "0"], "repeats must be at least 1; got 0"),
        (["bench", "--only", "cost"], "--only must be one of step, .*; got 'cost'; see wassersmooth bench --help-all"),
        (["bench", "--training", "nowhere"], "nowhere does not exist; expected a run, a study folder"),
        (["bench", "--model", "vgg"], "model must be small, resnet20"),
        (["sweep", "--etas", "0.1", "0.1"], "each value once"),
        (["sweep", "--grace", "nan"], "a positive grace; got .* and grace nan"),
        (["sweep", "--etas", "8/255", "strong"], "eta must be a number, such as 0.3 or 8/255; got 'strong' in 'wasserstein"),
        (["sweep", "--etas", "8/0"], "eta must be a number, such as 0.3 or 8/255; got '8/0'"),
        (["sweep", "--regularizers", "none"], "sweep searches --regularizer with a grid .*; got --regularizers none; leave"),
        (["sweep", "--regularizer", "none"], "got --regularizer none, which has no strength .*; choose another kind, such as"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("wassersmooth: ")
    assert err.count("\n") == 1
    assert re.search(complaint, err), err
    assert not list(tmp_path.glob("runs/*/*"))


def test_flags_go_before_the_file_and_the_file_before_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("epochs = 7\nbatch_size = 5\n")
    parsed = cli.parse(["train", "--preset", "mnist", "--config", str(path), "--epochs", "9"])
    assert isinstance(parsed, Train)
    preset = presets.with_preset(Train(), "mnist")
    assert (parsed.training.epochs, parsed.training.batch_size) == (9, 5)
    assert (parsed.data, parsed.regularizers) == (preset.data, preset.regularizers)
    assert parsed.folder == Path("runs/mine")


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["--dataset", "shapes.npz"], "shapes"),
        (["--dataset", "data/my.photos"], "my.photos"),
        (["--dataset", "mnist"], "mnist"),
        (["--preset", "mnist", "--dataset", "mnist"], "mnist"),
        (["--preset", "cifar10-quick", "--dataset", "cifar10"], "cifar10-quick"),
        (["--dataset", "shapes.npz", "--output", "there"], "../there"),
    ],
)
def test_other_data_have_a_folder_of_their_own(arguments: list[str], folder: str) -> None:
    for command in ("train", "reproduce", "sweep"):
        parsed = cli.parse([command, *arguments]).folder  # type: ignore[attr-defined]
        assert parsed == (Path("there") if folder.startswith("..") else Path("runs") / folder)


def test_the_preset_decides_the_folder_and_digits_is_the_default() -> None:
    assert cli.parse(["reproduce"]) == presets.with_preset(Reproduce(), "digits")
    assert cli.parse(["reproduce", "--preset=cifar10-quick"]).folder == Path("runs/cifar10-quick")  # type: ignore[attr-defined]


def test_lists_and_the_grid_are_flags() -> None:
    parsed = cli.parse(["sweep", "--etas", "0.5", "1", "--radii", "3", "--seeds", "4", "5", "--milestones", "1", "2"])
    assert isinstance(parsed, Sweep)
    assert parsed.grid.etas == (0.5, 1.0)
    assert parsed.grid.radii == (3,)
    assert parsed.seeds == (4, 5)
    assert parsed.training.milestones == (1, 2)


@pytest.mark.slow
def test_train_evaluate_report_one_after_the_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    regularizers = ["--regularizers", "none", "wasserstein:eta=0.3,radius=2"]
    code, out, err = run(capsys, "train", *tiny_flags(tmp_path), *regularizers)
    assert (code, err) == (0, "")
    assert "\x1b" not in out  # plain lines where there is no terminal
    assert "wasserstein-eta0.3-radius2-seed0  2/2" in out
    assert "; 2 runs in" in out
    study = str(tmp_path / "study")
    code, out, _ = run(capsys, "evaluate", study, "--suite", "quick", "--device", "cpu", "--test-images", "20")
    assert code == 0
    assert "Test error in percent on 20 images" in out
    assert "I-FGSM" in out
    for folder in (path.parent for path in (tmp_path / "study").glob("*/config.json")):
        evaluation = json.loads((folder / "evaluation.json").read_text())
        assert (evaluation["suite"], evaluation["images"]) == ("quick", 20)
        assert {"errors", "intervals", "flips", "masking", "verdict"} <= evaluation.keys()
        assert (folder / "exhibits.safetensors").exists()
    code, out, _ = run(capsys, "evaluate", study, "--suite", "quick", "--device", "cpu", "--test-images", "20")
    assert out.count("already measured") == 2
    code, out, _ = run(capsys, "report", study)
    assert code == 0
    assert (tmp_path / "study" / "report.html").stat().st_size > 10_000
    assert {"tables.md", "tables.tex"} <= {path.name for path in (tmp_path / "study").iterdir()}


def test_reproduce_is_one_command_and_goes_on_where_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*tiny_flags(tmp_path), "--suite", "quick", "--regularizers", "none", "euclidean:eta=0.2"]
    code, out, err = run(capsys, "reproduce", *flags)
    assert (code, err) == (0, "")
    assert f"report: {tmp_path / 'study' / 'report.html'}" in out
    code, out, _ = run(capsys, "reproduce", *flags)
    assert code == 0
    assert out.count("already finished") == out.count("already measured") == 2
    code, _, err = run(capsys, "reproduce", *flags, "--learning-rate", "0.5")
    assert code == 2
    assert "started with another configuration: learning_rate was" in err


def test_reproduce_asks_for_matplotlib_before_it_trains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "reproduce", *tiny_flags(tmp_path))
    assert code == 2
    assert "the report needs the package matplotlib; install it with: pip install 'wassersmooth[study]'" in err
    assert not (tmp_path / "study").exists()


def test_one_run_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "; 1 run in" in run(capsys, "train", *tiny_flags(tmp_path), "--regularizers", "none")[1]


@pytest.mark.parametrize("foreign", ["pickled", "safetensors", "text", "empty"])
def test_evaluate_says_where_a_model_of_the_users_own_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, foreign: str
) -> None:
    path, weights = tmp_path / "w.pt", {"weight": torch.zeros(3)}
    if foreign == "pickled":
        torch.save(weights, path)
    else:
        contents = {"safetensors": safetensors.torch.save(weights), "text": b"hello, world", "empty": b""}
        path.write_bytes(contents[foreign])
    code, _, err = run(capsys, "evaluate", str(path))
    assert code == 2
    assert f"evaluate takes run folders, study folders, and models that train or publish wrote; got {path}, which" in err
    assert "none of these; for weights of your own, name their model too: wassersmooth evaluate module:factory --weights" in err
    assert err.count("\n") == 1


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = [*tiny_flags(tmp_path), "--regularizers", "none", "euclidean:eta=0.2", "wasserstein:eta=0.3,radius=2"]
    code, out, _ = run(capsys, "doctor", *flags, "--milestones", "9")
    assert code == 0
    assert "choose " in out
    assert "note     --milestones 9: never reached in 2 epochs, and the learning rate never falls" in out


def test_doctor_goes_on_after_a_regularizer_that_does_not_fit_the_images(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = [*tiny_flags(tmp_path), "--regularizers", "deformation:eta=1,smoothness=99", "euclidean:eta=0.2"]
    code, out, err = run(capsys, "doctor", *flags)
    assert code == 2
    assert "problem  deformation:eta=1,smoothness=99: smoothness must be a finite number" in out
    assert "\neuclidean:eta=0.2\n" in out
    assert "the doctor found problems with deformation:eta=1,smoothness=99;" in err


def test_doctor_tries_what_would_be_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Double backward is fine with this model, and another engine was asked for."""
    (tmp_path / "no_forward_mode.py").write_text(
        "import torch\n"
        "class Twice(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: 2 * x)\n"
        "    backward = staticmethod(lambda ctx, g: 2 * g)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, channels, classes):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * channels, classes))\n"
        "    def forward(self, x):\n"
        "        return Twice.apply(self.layers(x))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = [*tiny_flags(tmp_path), "--model", "no_forward_mode:Net", "--regularizers", "dual-norm:eta=0.2"]
    assert run(capsys, "doctor", *flags)[0] == 0
    code, out, err = run(capsys, "doctor", *flags, "--engine", "forward_mode")
    assert code == 2
    assert "problem  does not train with --engine forward_mode: " in out
    assert "the doctor found problems with dual-norm:eta=0.2" in err
    code, _, err = run(capsys, "train", *flags, "--engine", "forward_mode")
    assert code == 2
    assert "forward" in err
    assert "--learning-rate" not in err


@pytest.mark.parametrize("last", [["--preset=cifar10-quick"], ["--preset", "cifar10-quick"]])
def test_the_last_of_two_flags_counts(last: list[str]) -> None:
    parsed = cli.parse(["train", "--preset", "digits", *last])
    assert isinstance(parsed, Train)
    assert parsed.preset == "cifar10-quick"
    assert parsed.data.dataset == "cifar10"


def test_an_error_of_the_system_is_not_taken_for_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> int:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(cli, "_run", refuse)
    with pytest.raises(ConnectionRefusedError):
        cli.main(["train"])


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            lambda: torch.empty(2**60),
            r"out of memory \(.*can't allocate memory.*\); what was finished is saved; give a smaller",
        ),
        (lambda: np.empty(2**57), r"out of memory \(Unable to allocate .*\); "),
        (lambda: raising(torch.OutOfMemoryError("CUDA out of memory.\nTried")), r"out of memory \(CUDA out of memory\.\); "),
    ],
)
def test_a_lack_of_memory_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], said: str
) -> None:
    monkeypatch.setattr(cli, "parse", lambda *given: work)
    code, _, err = run(capsys, "train")
    assert (code, err.count("\n")) == (1, 1)
    assert re.search(said, err), err


@pytest.mark.parametrize(
    "words", [["evaluate", "LONG"], ["train", "--output", "LONG"], ["train", "--dataset", "mnist", "--data-dir", "LONG"]]
)
def test_a_path_that_the_system_does_not_take_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, _, err = run(capsys, *(word.replace("LONG", 400 * "x") for word in words))
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be used (File name too long); check the path" in err


def test_a_folder_that_is_closed_to_the_user_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = PermissionError(errno.EACCES, "Permission denied", "/closed/data")
    monkeypatch.setattr(cli, "parse", lambda *given: lambda: raising(closed))
    code, _, err = run(capsys, "train")
    assert (code, err) == (
        2,
        "wassersmooth: /closed/data cannot be used (Permission denied); check the path and its permissions\n",
    )


def test_another_error_of_torch_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "parse", lambda *given: lambda: raising(RuntimeError("mat1 and mat2 cannot be multiplied")))
    with pytest.raises(RuntimeError, match="mat1"):
        cli.main(["train"])


def raising(error: Exception) -> object:
    raise error


def test_a_missing_package_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, _, err = run(capsys, "train", "--output", str(tmp_path))
    assert code == 2
    assert "pip install 'wassersmooth[study]'" in err


def test_a_run_that_diverges_ends_with_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The others are trained first: one bad eta must not cost the night."""
    flags = [*tiny_flags(tmp_path), "--regularizers", "none", "euclidean:eta=1e18", "euclidean:eta=0.1"]
    code, out, err = run(capsys, "train", *flags)
    assert code == 1
    assert "euclidean-eta1e+18-seed0: stopped, its loss or its scores are not finite" in out
    assert len(list((tmp_path / "study").glob("*/model.safetensors"))) == 2
    assert re.search("the loss is (nan|inf) at step", err)
    assert err.count("\n") == 1


@pytest.mark.slow
def test_python_m(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "wassersmooth", "fly"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("wassersmooth: the command must be one of")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"wassersmooth \d+\.\d+\S*\n", out)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_a_reader_that_has_enough_gets_no_traceback(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reading, writing = os.pipe()
    os.close(reading)  # as `| head -1` does when it has its line
    try:
        command = [sys.executable, "-m", "wassersmooth", *arguments]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])  # the write fails at the end, or in the middle of the command
def test_an_output_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "wassersmooth", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("wassersmooth: the output cannot be written (No space left on device)")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_an_output_under_a_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    (tmp_path / "study").write_text("not a folder")
    code, _, err = run(capsys, command, *tiny_flags(tmp_path))
    assert code == 2
    assert f"{tmp_path / 'study'} is a file; choose another --output" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "sweep", "doctor"])
def test_a_typo_in_the_model_leaves_no_run_behind(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    code, _, err = run(capsys, command, *tiny_flags(tmp_path), "--model", "smal")
    assert code == 2
    assert "got 'smal'" in err
    assert not list(tmp_path.glob("study/*/config.json"))
