"""The commands of the speed experiment: one line on bad input, a page, and files that say how they were made."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments import row_store
from experiments.speed import autoattack_cost, commands, operator_cost
from experiments.speed.commands import PROGRAM
from experiments.speed.page import with_blocks
from tests.robustness.small_models import digits, trained
from tests.study.fake_bench import fake_report
from tests.study.fake_runs import fake_study
from wassersmooth.cli import main
from wassersmooth.robustness import autoattack
from wassersmooth.study.bench import operator
from wassersmooth.study.data import Part
from wassersmooth.study.runs import locked

ROOT = Path(__file__).parent.parent.parent.parent
ORIGIN = {"hardware", "threads", "python", "torch", "commit", "command"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["draw"], "the command must be one of render, operator, attacks, autoattack; got 'draw'"),
        (["render"], r"a file that wassersmooth bench has written; got results/speed/bench-h200\.json, which does not exist"),
        (["render", "half.json"], "; restore it, or measure it again"),
        (["render", "other.json"], "another kind of JSON"),
        (["operator", "--repeats", "0"], "repeats must be at least 1; got 0"),
        (["attacks", "--images", "0"], "images must be at least 1; got 0"),
        (["attacks", "--device", "tpu"], "device must be auto, cpu, cuda"),
        (["autoattack", "--member-images", "0"], "member_images must be at least 1; got 0"),
        (["autoattack", "--first-image", "-1"], "first_image must be at least 0; got -1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    assert main(arguments, PROGRAM) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m experiments.speed: ")
    assert said.count("\n") == 1
    assert re.search(complaint, said), said


def test_the_page_is_rendered_and_the_time_of_a_study_goes_into_the_file(tmp_path: Path) -> None:
    study, source, page = fake_study(tmp_path / "night", seeds=2), tmp_path / "bench.json", tmp_path / "speed.md"
    page.write_text((ROOT / "docs" / "speed.md").read_text())
    source.write_text(json.dumps(fake_report(training=None)))
    assert main(["render", str(source), "--page", str(page)], PROGRAM) == 0
    assert "| night | 6 | 12 |" not in page.read_text()
    assert main(["render", str(source), "--page", str(page), "--training", str(study)], PROGRAM) == 0
    assert "| night | 6 | 12 |" in page.read_text()
    assert json.loads(source.read_text())["training"]["study"] == "night"


def test_attacks_of_all_libraries_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "attacks.json"
    flags = "--device cpu --rounds 1 --images 2 --steps 2"
    assert main(["attacks", *flags.split(), "--output", str(path)], PROGRAM) == 0
    report = json.loads(path.read_text())
    committed = json.loads((ROOT / "results" / "speed" / "attacks-cpu.json").read_text())
    assert report.keys() == committed.keys() >= ORIGIN
    assert report["rows"][0].keys() == committed["rows"][0].keys()
    for row in report["rows"]:
        assert "foolbox" in row["ratio"]
        assert max(row["largest_difference"].values()) < 1e-5
    assert f"| {report['rows'][0]['attack']} | " in capsys.readouterr().out


def test_autoattack_beside_its_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process measures, and rows that are there, are left alone; the attacks themselves are shortened."""
    asked = []

    def fake(model: nn.Module, part: Part, ball: tuple[float, str], attack: str, batch_size: int) -> Tensor:
        asked.append((ball, attack))
        return torch.arange(len(part)) < 2

    monkeypatch.setattr(autoattack_cost, "reference", fake)
    monkeypatch.setattr(autoattack, "ITERATIONS", 2)
    monkeypatch.setattr(autoattack, "QUERIES", 2)
    monkeypatch.setattr(autoattack_cost, "MEMBERS", ("apgd-ce",))
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "few.npz", images=generator.integers(0, 256, (5, 3, 32, 32), np.uint8), labels=[0, 1, 2, 3, 9])
    path = tmp_path / "rows.json"
    common = f"--dataset {tmp_path / 'few.npz'} --images 4 --member-images 3 --speed-images 2 --large-images 2 --device cpu"
    common += f" --output {path} --models {ROOT / 'results/paper/models'} --networks none"
    with locked(tmp_path / "rows.parity-none-linf-8-255-ensemble.lock"):
        assert main(["autoattack", "--parts", "parity", "members", *common.split()], PROGRAM) == 0
    assert len(asked) == 5
    for _ in range(2):
        assert main(["autoattack", "--parts", "parity", "members", *common.split()], PROGRAM) == 0
        assert len(asked) == 6
    assert main(["autoattack", "--parts", "parity", "--balls", "l2 0.5", *common.split()], PROGRAM) == 0
    assert len(asked) == 6
    assert not [*tmp_path.glob("rows.parity*"), *tmp_path.glob("rows.members*")]
    rows = json.loads(path.read_text())["rows"]
    assert {(row["ball"], row["attack"]) for row in rows} == {
        (ball, attack) for ball in ("linf 2/255", "linf 8/255", "l2 0.5") for attack in ("ensemble", "apgd-ce")
    }
    for row in rows:
        assert row["wrong"]["clean"] <= row["wrong"]["ours"] <= row["images"] == (4 if row["attack"] == "ensemble" else 3)
        assert row["wrong"]["reference"] == 2
        assert row["origin"].keys() >= ORIGIN
    said = capsys.readouterr().out
    assert "1 of 6: parity, none, linf 2/255, ensemble\nparity none, linf 2/255, ensemble: of 4 images wrong " in said
    assert main(["autoattack", "--seconds", "0", "--parts", "speed", *common.split()], PROGRAM) == 0
    assert len(asked) == 6


def test_speed_of_autoattack_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both networks at a small size; half of the images of the second survive, or only the first attack is timed."""
    monkeypatch.setattr(autoattack_cost, "reference", lambda model, part, ball, attack, size: torch.arange(len(part)) < size)
    monkeypatch.setattr(autoattack_cost, "LARGE_DEPTHS", (1, 1))
    monkeypatch.setattr(autoattack_cost, "LARGE_SIZE", 32)
    monkeypatch.setattr(autoattack, "ITERATIONS", 2)
    monkeypatch.setattr(autoattack, "QUERIES", 2)
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "few.npz", images=generator.integers(0, 256, (3, 3, 32, 32), np.uint8), labels=[0, 1, 9])
    path, page = tmp_path / "rows.json", tmp_path / "page.md"
    text = (
        "before\n<!-- bench: autoattack_speed -->\n<!-- /bench -->\n<!-- bench: autoattack_parity -->\nold\n<!-- /bench -->\n"
    )
    page.write_text(text)
    few = "--images 3 --member-images 1 --speed-images 2 --large-images 8"
    flags = f"--parts speed --dataset {tmp_path / 'few.npz'} {few} --device cpu"
    flags += f" --output {path} --page {page} --models {ROOT / 'results/paper/models'}"
    assert main(["autoattack", *flags.split()], PROGRAM) == 0
    small, batched, large = json.loads(path.read_text())["rows"]
    assert (small["images"], large["images"], large["pixels"]) == (2, 8, [3, 32, 32])
    assert large["wrong"]["clean"] == 0
    assert 1 <= large["wrong"]["ours"] <= 7
    filled = page.read_text()
    assert f"| ResNet-50, 3x32x32 | 8 | {255 * large['epsilon']:.3g}/255 | {large['wrong']['ours']} / 8 |" in filled
    assert f"| ResNet-20, 3x32x32 | 2 | 2/255 | {small['wrong']['ours']} / 2 |" in filled
    assert f"| ResNet-20, 3x32x32, reference in batches of 250 | 2 | 2/255 | {batched['wrong']['ours']} / 2 |" in filled
    assert filled.endswith("<!-- bench: autoattack_parity -->\nNot measured.\n<!-- /bench -->\n")
    published = small | {"part": "parity", "network": "none", "ball": "l2 0.5"}
    (tmp_path / "cpu.json").write_text(json.dumps({"rows": [published, small | {"seconds": {"ours": 1.0, "reference": 77.0}}]}))
    assert main(["autoattack", "--seconds", "0", "--more-rows", str(tmp_path / "cpu.json"), *flags.split()], PROGRAM) == 0
    assert f"| none, l2 0.5 | {small['wrong']['clean']} | {small['wrong']['ours']} / 2 |" in page.read_text()
    assert "77.0" not in page.read_text()


def test_parts_of_a_row_of_autoattack_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images from one on are a row of their own; rows that follow one another are added up, and none behind a gap."""
    seen = []

    def fake(model: nn.Module, part: Part, ball: tuple[float, str], attack: str, batch_size: int) -> Tensor:
        seen.append(part.images)
        return torch.ones(len(part), dtype=torch.bool)

    monkeypatch.setattr(autoattack_cost, "reference", fake)
    monkeypatch.setattr(autoattack_cost, "own", lambda *arguments: torch.ones(len(arguments[1]), dtype=torch.bool))
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "few.npz", images=generator.integers(0, 256, (9, 3, 32, 32), np.uint8), labels=np.arange(9))
    path, page = tmp_path / "rows.json", tmp_path / "page.md"
    page.write_text("<!-- bench: autoattack_parity -->\n<!-- /bench -->\n")
    common = f"--parts parity --balls 'l2 0.5' --networks none --dataset {tmp_path / 'few.npz'} --device cpu --output {path}"
    common += f" --page {page} --models {ROOT / 'results/paper/models'}"
    for images, first, said in ((4, 0, " | 4 / 4"), (2, 6, " | 4 / 4"), (2, 4, " (in 3 parts) | 8 / 8")):
        assert main(["autoattack", *shlex.split(common), "--images", f"{images}", "--first-image", f"{first}"], PROGRAM) == 0
        name, counts = said.split(" | ")
        assert re.search(rf"\| none, l2 0.5{re.escape(name)} \| \d \| {counts} \|", page.read_text())
    assert "Wrong of 8 images after" in page.read_text()
    chosen = torch.cat([seen[0], seen[2], seen[1]])
    assert len(chosen.unique(dim=0)) == 8
    assert [row.get("first") for row in json.loads(path.read_text())["rows"]] == [4, 6, None]


def test_the_large_network_is_a_resnet_50() -> None:
    with torch.device("meta"):
        network = autoattack_cost.bottlenecks(autoattack_cost.LARGE_DEPTHS)
        assert network(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032


@pytest.mark.parametrize("ball", ["linf 2/255", "l2 0.5"])
def test_one_attack_of_the_reference(ball: str) -> None:
    """The package itself is called, with its own settings."""
    _, _, images, labels = digits()
    part = Part(images[:30], labels[:30])
    epsilon, norm = autoattack_cost.BALLS[ball]
    ours, theirs = (
        call(trained(), part, (16 * epsilon if norm == "linf" else epsilon, norm), "apgd-ce", *size)
        for call, size in ((autoattack_cost.own, ()), (autoattack_cost.reference, (30,)))
    )
    assert 2 < theirs.sum() < 28
    assert abs(int(ours.sum()) - int(theirs.sum())) <= 2


def test_a_damaged_row_of_autoattack_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("<!-- bench: autoattack_speed -->\n<!-- /bench -->\n")
    row = {"part": "speed", "network": "resnet20", "ball": "half survive", "attack": "ensemble", "reference": "1"}
    row |= {"images": 9, "epsilon": 0.1, "pixels": [3, 8, 8], "origin": {"hardware": "x", "torch": "2"}}
    row |= {"wrong": {"clean": 1, "ours": 2, "reference": 2}, "seconds": {"ours": 1.0, "reference": 2.0}}
    command = ["autoattack", "--seconds", "0", "--output", str(tmp_path / "a.json"), "--page", str(tmp_path / "page.md")]
    (tmp_path / "a.json").write_text(json.dumps({"rows": [row]}))
    assert main(command, PROGRAM) == 0
    assert "| 2 / 2 | 1.0 | 2.0 | 2.0 |" in (tmp_path / "page.md").read_text()
    for mistake in ({"part": None}, {"network": "<b>"}, {"seconds": {"ours": 0, "reference": 1.0}}, {"wrong": {"ours": 1}}):
        (tmp_path / "a.json").write_text(json.dumps({"rows": [row | mistake]}))
        capsys.readouterr()
        assert main(command, PROGRAM) == 2
        assert re.fullmatch(r".*a\.json: row 1 is damaged \(.*\); restore .*\n", capsys.readouterr().err)


def test_the_page_of_robustness_says_what_autoattack_measured() -> None:
    folder = ROOT / "results" / "speed"
    rows = [row for name in ("cpu", "h200") for row in json.loads((folder / f"autoattack-{name}.json").read_text())["rows"]]
    text = (ROOT / "docs" / "robustness.md").read_text()
    assert with_blocks(text, autoattack_cost.blocks(row_store.merged([], rows, autoattack_cost.KEY))) == text


def test_the_cost_of_the_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_cost, "SMALL", (2, 3, 32, 32))
    monkeypatch.setattr(operator_cost, "LARGE", (1, 1, 224, 224))
    monkeypatch.setitem(operator.SHAPES, "cpu", ((2, 1, 12, 12),))
    rounds: list[int] = []
    measured = operator_cost.operator_rows
    monkeypatch.setattr(
        operator_cost, "operator_rows", lambda device, repeats: rounds.append(repeats) or measured(device, None, repeats)
    )
    path = tmp_path / "operator.json"
    assert main(["operator", "--device", "cpu", "--repeats", "1", "--output", str(path)], PROGRAM) == 0
    report, committed = (json.loads(p.read_text()) for p in (path, ROOT / "results" / "speed" / "operator-cpu.json"))
    assert report.keys() - {"operator"} == committed.keys() - {"operator"} >= ORIGIN  # older files have no second table
    for part in ("milliseconds", "ratios", "memory"):
        assert report[part].keys() == committed[part].keys()
    said = capsys.readouterr().out
    assert "loop / quad, 32px r=8" in said
    assert "| operation | radius | us | copy, us | times a copy | error |" in said
    for name in ("mv backward in x, 2x1x12x12, learned | 8", "quad forward, 2x1x12x12, motion, advection | 2"):
        assert f"| {name} | " in said
    assert ("not captured" in said, "failed" in said) == (False, False)
    assert [row["ratio"] > 0 for row in report["operator"] if row["op"] == "sample"] == [True] * 3
    operator_cost.measure_operator(torch.device("cpu"), 6)
    assert rounds == [1, 5]
    assert report["command"].startswith(commands.PROGRAM.name)
