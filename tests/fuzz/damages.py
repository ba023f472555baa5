"""The second finder: damaged files. A command that reads one says so in one line, or succeeds; nothing else changes.

A study is trained and measured once, in a moment. For every act of damage it is copied, one file is damaged byte by byte or
value by value, and a command that reads it is run in this process.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import tempfile
import traceback
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments.certificates.commands import PROGRAM as CERTIFICATES
from experiments.frontier.commands import PROGRAM as FRONTIER
from experiments.paper.commands import PROGRAM as PAPER
from experiments.speed.commands import PROGRAM as SPEED
from tests.fuzz.findings import Findings
from tests.study.small_studies import CPU, SILENT, stripes_file
from tests.study.test_kill import model_bytes
from wassersmooth import cli
from wassersmooth.study import data
from wassersmooth.study.commands import Train
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run
from wassersmooth.study.training import training

RESULTS = Path(__file__).parents[2] / "results"
TOML = 'epochs = 2\nbatch_size = 16\nlearning_rate = 0.02\nregularizers = ["none"]\nseeds = [0]\nactivation = "relu"\n'
DEEP = "[" * 100_000
VALUES = (
    "null",
    "true",
    '"x"',
    "[]",
    "{}",
    "-1",
    "0",
    "1e308",
    "1" * 400,
    "NaN",
    "Infinity",
    '"' + "y" * 5000 + '"',
    "[1, [2]]",
    DEEP,
)
REWRITTEN = (
    "evaluation.json",
    "study.json",
    "report.md",
    "report.html",
    "tables.md",
    "tables.tex",
    "measured.jsonl",
    "exhibits.safetensors",
    "sweep.json",
    "certificates.json",
    "certified.jsonl",
)


@dataclass(frozen=True)
class Act:
    """A command, the files that it reads, and how often it is chosen."""

    arguments: tuple[str, ...]
    files: tuple[str, ...]
    often: int
    program: cli.Program = cli.WASSERSMOOTH


STUDY = "--dataset {}/stripes.npz --epochs 3 --batch-size 16 --validation 0.25 --device cpu --threads 1"
TRAIN = f"{STUDY} --regularizers none"
CERTIFY = "--sigma 0.3 --radius 1 --samples 30 --select 5 --device cpu --test-images 12"
ACTS = (
    Act(
        ("evaluate", "{}/study", "--suite", "quick", "--device", "cpu", "--test-images", "12"), ("study/*/*", "stripes.npz"), 8
    ),
    Act(("train", *TRAIN.split(), "--output", "{}/begun"), ("begun/*/*", "stripes.npz"), 8),
    Act(("doctor", *TRAIN.split(), "--config", "{}/mine.toml"), ("mine.toml",), 4),
    Act(
        # A journal that lost its end names this very process as a worker: it is waited for, but not for long.
        ("sweep", *STUDY.split(), "--etas", "0.1", "--radii", "1", "--grace", "1", "--output", "{}/sweep"),
        ("sweep/*.journal", "sweep/sweep.json"),
        3,
    ),
    Act(("report", "{}/study"), ("study/*/*",), 2),
    Act(("certify", "{}/study", *CERTIFY.split()), ("study/*/certif*.json*", "study/*/model.safetensors", "stripes.npz"), 4),
    Act(("render", "--results", "{}/paper/paper.json"), ("paper/*.json",), 1, PAPER),
    Act(("render", "--results", "{}/frontier/frontier.json"), ("frontier/*.json",), 1, FRONTIER),
    Act(("render", "{}/certificates"), ("certificates/*.json",), 2, CERTIFICATES),
    Act(("render", "{}/speed/bench-h200.json", "--page", "{}/speed/speed.md"), ("speed/bench-h200.json",), 1, SPEED),
)


@lru_cache
def template() -> tuple[Path, Path]:
    """A folder with a finished and measured study, a run that was stopped after its second epoch, and results; and a copy.

    Configurations name files by their full paths, so every act of damage is done in the same folder.
    """
    root = Path(tempfile.mkdtemp(prefix="fuzz-damage-"))
    folder = root / "files"
    folder.mkdir()
    stripes_file(folder)
    (folder / "mine.toml").write_text(TOML)
    for name in ("paper", "frontier", "certificates", "speed"):
        (folder / name).mkdir()
        for file in (RESULTS / name).glob("*.json"):
            shutil.copy(file, folder / name)
    shutil.copy(RESULTS.parent / "docs" / "speed.md", folder / "speed")
    assert call(("train", *TRAIN.split(), "--output", "{}/study"), folder)[0] == 0
    for act in (ACTS[0], ACTS[3], ACTS[5]):
        assert call(act.arguments, folder)[0] == 0
    begun = cli.parse([part.format(folder) for part in ACTS[1].arguments])
    assert isinstance(begun, Train)
    run = Run.of(begun.folder, begun.runs(begun.name)[0])
    with run.claimed():
        epochs = training(run, data.load(begun.data), CPU, SILENT)
        for _ in range(2):
            next(epochs)
        epochs.close()
    shutil.copytree(folder, root / "whole")
    return folder, root / "whole"


def run(acts: int, seed: int, first: int = 0, found: Findings | None = None) -> Findings:
    """Damage and run. The files of the last act are left."""
    found = found or Findings()
    for number in range(first, first + acts):
        dice = random.Random(f"damage {seed} {number}")
        act = dice.choices(ACTS, [act.often for act in ACTS])[0]
        folder, whole = template()
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        files = [file for pattern in act.files for file in folder.glob(pattern) if file.is_file() and file.suffix != ".lock"]
        file = dice.choice(sorted(files))
        what = damage(file, dice)
        before = contents(folder)
        code, complaint = call(act.arguments, folder, act.program)
        fault = judge(act, folder, file, before, code, complaint)
        found.outcomes["failure" if fault else "success" if code == 0 else "refusal"] += 1
        if fault:
            command = " ".join([act.program.name, *(part.format(folder) for part in act.arguments)])
            told = f"{file.relative_to(folder)}: {what}\n  {fault}\n  {complaint[-1500:].strip()}\n  {command}"
            found.add(f"{told}\n  # make fuzz DAMAGES=1 SEED={seed} FIRST={number} repeats it, and leaves its files\n")
            if found.enough:
                break
    return found


def call(arguments: tuple[str, ...], folder: Path, program: cli.Program = cli.WASSERSMOOTH) -> tuple[int | None, str]:
    """Run a command here: its exit code, None where an exception came through, and what it wrote."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            code: int | None = cli.main([part.format(folder) for part in arguments], program)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception:
            code = None
            traceback.print_exc()
    return code, err.getvalue()


def judge(act: Act, folder: Path, file: Path, before: dict[str, bytes], code: int | None, complaint: str) -> str:
    """What is wrong with an outcome, in a few words."""
    if code not in (0, 1, 2):
        return f"exit code {code}"
    after, own = contents(folder), str(file.relative_to(folder))
    if code:
        lines = [line for line in complaint.splitlines() if line.strip()]
        if len(lines) != 1 or not lines[0].startswith(f"{act.program.name}: "):
            return f"{len(lines)} lines of complaint"
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        changed = [
            name for name in changed if not name.endswith((".lock", *REWRITTEN[1:6])) and not _is_longer(name, before, after)
        ]
        return f"a refusal that changes {changed}" if changed else ""
    if "Traceback" in complaint:
        return "a traceback"
    lost = [name for name, content in before.items() if name != own and after.get(name) != content and _is_input(name, act)]
    if lost:
        return f"a success that changes {lost}"
    if act.arguments[0] == "train" and not own.endswith("npz"):
        trained, expected = folder / "begun" / "none-seed0", template()[1] / "study" / "none-seed0"
        if model_bytes(trained) != model_bytes(expected):
            return "other weights than those of an undisturbed run"
        try:
            epochs = [row["epoch"] for row in Run.at(trained).metrics()]
        except StudyError as error:
            return f"a success that leaves a run nobody can read: {error}"
        if epochs != [1, 2, 3]:
            return f"the epochs {epochs}"
    if act.arguments[0] == "certify" and "certif" in own and smoothings(folder) != smoothings(template()[1]):
        return "other certificates than those of an undisturbed run"
    return ""


def smoothings(folder: Path) -> Any:
    """What certify has found."""
    return json.loads((folder / "study" / "none-seed0" / "certificates.json").read_text())["smoothings"]


def _is_longer(name: str, before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether a journal has only been continued."""
    return name.endswith(".journal") and after.get(name, b"").startswith(before.get(name, b""))


def _is_input(name: str, act: Act) -> bool:
    """Whether a file is read and not written by a command that succeeds."""
    if act.arguments[0] in ("train", "sweep"):
        return not name.startswith(("begun/", "sweep/"))
    return not name.endswith((*REWRITTEN, ".lock", ".png", ".md"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its name, folders and links included."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink() or path.is_dir():
            found[name] = b"link" if path.is_symlink() else b"folder"
        else:
            found[name] = path.read_bytes()
    return found


def damage(file: Path, dice: random.Random) -> str:
    """Damage a file, and say how."""
    if file.suffix in (".json", ".jsonl", ".toml") and dice.random() < 0.6:
        return damage_value(file, dice)
    raw, kind = (
        file.read_bytes(),
        dice.choice(("flip", "flip", "truncate", "delete", "folder", "link", "append", "empty", "zeros")),
    )
    at = dice.randrange(len(raw)) if raw else 0
    if kind in ("delete", "folder", "link"):
        file.unlink()
        if kind == "folder":
            file.mkdir()
        if kind == "link":
            file.symlink_to(file)
        return kind
    changed = {
        "flip": raw[:at] + bytes([raw[at] ^ (1 << dice.randrange(8))]) + raw[at + 1 :] if raw else b"\xff",
        "truncate": raw[:at],
        "append": raw + dice.randbytes(7),
        "empty": b"",
        "zeros": raw[:at] + bytes(len(raw) - at),
    }
    file.write_bytes(changed[kind])
    return f"{kind} at byte {at} of {len(raw)}"


def damage_value(file: Path, dice: random.Random) -> str:
    """Replace or remove one value of a file of JSON, of JSON lines or of TOML."""
    value, lines = dice.choice(VALUES), file.read_text().splitlines()
    if file.suffix == ".toml":
        row = dice.randrange(len(lines))
        key = lines[row].partition(" = ")[0]
        lines[row] = f"{key} = {value}"
        file.write_text("\n".join(lines) + "\n")
        return f"{key} = {value[:40]}"
    row = dice.choice([place for place, line in enumerate(lines) if line]) if file.suffix == ".jsonl" else None
    content = json.loads(lines[row] if row is not None else file.read_text())
    path, marker = [], "\x00here\x00"
    at: Any = content
    while isinstance(at, (dict, list)) and at and (not path or dice.random() < 0.8):
        key = dice.choice(sorted(at)) if isinstance(at, dict) else dice.randrange(len(at))
        path.append((at, key))
        at = at[key]
    where = ".".join(str(key) for _, key in path)
    if not path:
        text = value
    elif dice.random() < 0.2:
        parent, key = path[-1]
        del parent[key]
        text, value = json.dumps(content), "removed"
    else:
        parent, key = path[-1]
        parent[key] = marker
        text = json.dumps(content).replace(json.dumps(marker), value)
    if row is not None:
        lines[row] = text
        text = "\n".join(lines) + "\n"
    file.write_text(text)
    return f"{where} {f'of line {row + 1} ' if row is not None else ''}= {value[:40]}"
