"""The third finder: training, evaluation and certification are killed at random moments and continued.

They end as if nothing had happened.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.fuzz.findings import Findings
from tests.study.test_kill import model_bytes

TRAIN = (
    "train --preset digits --epochs 4 --regularizers wasserstein:eta=0.3,radius=2 --seeds 0 --device cpu --threads 1 --output"
)
EVALUATE = "evaluate --suite quick --test-images 60 --device cpu"
CERTIFY = "certify --sigma 0.3 --radius 1 --samples 3000 --test-images 80 --device cpu"
COMMANDS = {"train": TRAIN, "evaluate": EVALUATE, "certify": CERTIFY}
# The file that each command adds to, and what else a new evaluation or certification writes.
FILES = {
    "train": ("metrics.jsonl",),
    "evaluate": ("measured.jsonl", "evaluation.json", "report.md", "exhibits.safetensors"),
    "certify": ("certified.jsonl", "certificates.json", "certificates.md", "certificates.png"),
}
NAME = "wasserstein-eta0.3-radius2-seed0"
LIMIT = 600  # seconds for an undisturbed command


def start(kind: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wassersmooth", *COMMANDS[kind].split(), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@lru_cache
def undisturbed() -> tuple[Path, dict[str, tuple[float, float]]]:
    """A finished and measured study, and for each command when it wrote its first file and when it ended."""
    folder, moments = Path(tempfile.mkdtemp(prefix="fuzz-kills-")) / "study", {}
    for kind, (first, *_) in FILES.items():
        began, process, wrote = time.monotonic(), start(kind, folder), 0.0
        while process.poll() is None and time.monotonic() - began < LIMIT:
            if not wrote and (folder / NAME / first).exists():
                wrote = time.monotonic() - began
            time.sleep(0.01)
        assert process.returncode == 0, process.communicate()[1]
        moments[kind] = (wrote, time.monotonic() - began)
    return folder, moments


def run(kills: int, seed: int, first: int = 0, found: Findings | None = None) -> Findings:
    """Kill and continue. Every kill is of a new run, or of the evaluation of a trained one."""
    found, (whole, moments) = found or Findings(), undisturbed()
    for number in range(first, first + kills):
        dice = random.Random(f"kill {seed} {number}")
        kind = dice.choice(sorted(moments))
        wrote, ended = moments[kind]
        moment = dice.uniform(0.9 * wrote, ended)
        folder = Path(tempfile.mkdtemp(prefix="fuzz-killed-"))
        if kind != "train":
            shutil.copytree(whole, folder, dirs_exist_ok=True)
            for file in FILES[kind]:
                (folder / NAME / file).unlink(missing_ok=True)
        victim = start(kind, folder)
        time.sleep(moment)
        victim.send_signal(signal.SIGKILL)
        victim.wait(timeout=60)
        left = sorted(path.name for path in folder.glob(f"{NAME}/*"))
        again = start(kind, folder)
        _, complaint = again.communicate(timeout=LIMIT)
        fault = (
            f"exit code {again.returncode}: {complaint.strip()}"
            if again.returncode
            else difference(kind, folder / NAME, whole / NAME)
        )
        found.outcomes["failure" if fault else f"{kind} continued"] += 1
        if fault:
            told = f"{kind} killed after {moment:.2f} s, which left {', '.join(left)}\n  {fault}"
            found.add(f"{told}\n  # make fuzz KILLS=1 SEED={seed} FIRST={number}; {folder} is left as it is\n")
            if found.enough:
                break
        else:
            shutil.rmtree(folder)
    return found


def difference(kind: str, run: Path, expected: Path) -> str:
    """What a continued run has that an undisturbed one has not."""
    if model_bytes(run) != model_bytes(expected):
        return "other weights"
    name = FILES[kind][0]
    if kind == "certify":
        if _certified(run) != _certified(expected):
            return "other certificates"
    elif _rows(run / name) != _rows(expected / name):  # those of certificates may have been begun twice
        return f"other rows in {name}"
    if kind == "evaluate" and _results(run) != _results(expected):
        return "another evaluation"
    leftovers = [path.name for path in run.iterdir() if path.name.endswith(".part")]
    return f"leaves {leftovers}" if leftovers else ""


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    # Somebody may commit meanwhile, and the origin names the commit.
    return [{key: value for key, value in row.items() if "second" not in key and key != "origin"} for row in rows]


def _certified(run: Path) -> Any:
    return json.loads((run / "certificates.json").read_text())["smoothings"]


def _results(run: Path) -> dict[str, Any]:
    stored = json.loads((run / "evaluation.json").read_text())
    return {key: stored[key] for key in ("errors", "intervals", "flips", "verdict")}
