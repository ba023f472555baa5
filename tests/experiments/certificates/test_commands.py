"""The experiment on a few made-up images: every command, a run that stops and continues, and a page from rows alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.certificates import commands, levine_feizi, measuring, networks, settings, throughput
from experiments.certificates.commands import PROGRAM
from experiments.certificates.page import Certified, percent, write_page
from experiments.certificates.settings import SMALL, Setting, settings_of
from experiments.certificates.training import learning_rate
from wassersmooth.cli import main
from wassersmooth.study.data import Dataset, Part


def made_up(size: int, channels: int) -> Dataset:
    """Two classes of stripes, as a data set of ten."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    images = torch.rand(40, channels, size, size, generator=generator) / 2
    images[labels == 0, :, ::2] += 0.5
    part = Part(images, labels)
    return Dataset(part, Part(images[:0], labels[:0]), Part(images[:6], labels[:6]), 10, "made up")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = replace(SMALL, images=6, samples=60, steps=1, draws=2, checked=20)
    monkeypatch.setattr(commands, "SMALL", scale)
    monkeypatch.setattr(measuring, "PART", 4)
    monkeypatch.setattr(settings, "MNIST_SELECT", 10)
    monkeypatch.setattr(commands.Where, "load", lambda self, network, device: made_up(28, 1))


@pytest.mark.slow
def test_run_throughput_and_render(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--small", "--device", "cpu", "--output", str(tmp_path), "--networks", "mnist"]
    assert main(["run", *flags, "--limit", "0"], PROGRAM) == 0
    assert "out of time; the same command continues" in capsys.readouterr().out
    assert main(["run", *flags], PROGRAM) == 0
    rows = json.loads((tmp_path / "certificates.json").read_text())["rows"]
    kinds = [row["row"] for row in rows]
    assert (kinds.count("certificates"), kinds.count("training"), kinds.count("attack")) == (12, 7, 2)
    (plain,) = (row for row in rows if row["row"] == "plain")
    assert (plain["noise"], plain["sigma"], len(plain["unsmoothed"])) == ("none", 0.0, 6)
    one = next(row for row in rows if row["row"] == "certificates" and row["noise"] == "wasserstein")
    assert len(one["radii"]) == 4
    assert not any(one["l2"])
    assert one["origin"]["versions"]["torch"] == torch.__version__
    before = (tmp_path / "certificates.json").read_bytes()
    assert main(["run", *flags], PROGRAM) == 0  # nothing is left to do
    assert (tmp_path / "certificates.json").read_bytes() == before
    assert main(["throughput", *flags], PROGRAM) == 0
    speed = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert [row["noise"] for row in speed] == ["euclidean", "wasserstein"]
    assert all(row["bare"] > 0 < row["certify"] for row in speed)
    assert main(["render", str(tmp_path)], PROGRAM) == 0
    page = (tmp_path / "certificates.md").read_text()
    assert page.count("| Wasserstein noise |") >= 5
    assert "0.0132" in page
    assert re.search(r"Trained in the same way without noise, it is wrong on [\d.]+ \(", page.replace("\n", " "))
    assert "## What is not certified" in page
    assert (tmp_path / "mnist.png").stat().st_size > 1000


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Networks in the layout of Levine and Feizi's, untrained."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    parts = {"0": nn.Conv2d(1, 16, 4), "2": nn.Conv2d(16, 32, 4), "5": nn.Linear(32 * 49, 100), "7": nn.Linear(100, 10)}
    tensors = {f"module.{place}.{name}": tensor for place, part in parts.items() for name, tensor in part.state_dict().items()}
    for flow in levine_feizi.FLOWS:
        torch.save({"net": tensors, "epoch": 199}, folder / f"mnist_smooth_base_lr_0.001_stddev_{flow:g}_epoch_199.pth")
    return folder


def test_published_networks(
    small: None, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "PART", 4)
    flags = [str(published), "--small", "--device", "cpu", "--output", str(tmp_path)]
    assert main(["published", *flags, "--flows", "0.01"], PROGRAM) == 0
    assert main(["published", *flags, "--flows", "0.01", "0.02"], PROGRAM) == 0
    assert capsys.readouterr().out.count("flows of 0.01: images 0 to 4") == 1, "it was certified already"
    rows = json.loads((tmp_path / "certificates.json").read_text())["rows"]
    assert [(row["sigma"], row["part"], len(row["their_w1"])) for row in rows] == [
        *((0.01, 0, 4), (0.01, 4, 2), (0.02, 0, 4), (0.02, 4, 2))
    ]
    rows = [row | {"labels": [1] * len(row["labels"]), "classes": [1] * len(row["labels"])} for row in rows]
    rows = [row | {"relative_w1": [0.03] * len(row["labels"]), "their_classes": [-1] * len(row["labels"])} for row in rows]
    (tmp_path / "certificates.json").write_text(json.dumps({"rows": rows}))
    assert main(["render", str(tmp_path)], PROGRAM) == 0
    page = (tmp_path / "certificates.md").read_text()
    assert (
        f"| 0.01 | {percent(6, 6)} | {percent(0, 6)} | {percent(0, 6)} | {percent(6, 6)} | 0.0000 | 0.0300 | 0.0132 |" in page
    )
    (published / "mnist_smooth_base_lr_0.001_stddev_0.02_epoch_199.pth").write_bytes(b"something else")
    assert main(["published", *flags], PROGRAM) == 2
    assert "0.02_epoch_199.pth is not a network of Levine and Feizi (" in capsys.readouterr().err
    assert main(["published", *flags, "--flows", "0.3"], PROGRAM) == 2
    assert "flows must be among 0.005, 0.01, 0.02; got 0.3" in capsys.readouterr().err


def test_noise_and_radius_of_levine_and_feizi() -> None:
    """Flows of a standard deviation of 0.3: those of a corner are two, and the noise moves mass only."""
    seen = []

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.stack([x[:, 0, 0, 0], torch.zeros(len(x))], 1)

    image = torch.full((1, 4, 5), 0.5, dtype=torch.float64)
    votes = levine_feizi.laplace_votes(Model(), image, 0.3, 20_500, torch.Generator().manual_seed(0))
    assert votes.sum() == 20_500
    noise = torch.cat(seen) - image
    assert float(noise.sum((1, 2, 3)).abs().max()) < 1e-12
    assert float(noise[:, 0, 0, 0].std()) == pytest.approx(0.3 * 2**0.5, rel=0.03)
    assert float(noise[:, 0, 1, 1].std()) == pytest.approx(0.3 * 4**0.5, rel=0.03)
    corner, right = noise[:, 0, 0, 0], noise[:, 0, 0, 1]
    assert float((corner * right).mean()) == pytest.approx(-(0.3**2), rel=0.1)
    assert float((corner**4).mean() / (corner**2).mean() ** 2) == pytest.approx(4.5, rel=0.1)  # of two Laplace variables
    assert levine_feizi.laplace_radius(0.99, 0.01) == pytest.approx(0.01 * 1.15, rel=3e-3)  # 1.62 / sqrt(2) at a flow of 1
    assert levine_feizi.laplace_radius(0.4, 0.01) == 0


def test_sigma_is_proportional_to_the_mass() -> None:
    """A half-space through noise of both kinds: the radius over the mass does not depend on the brightness."""

    class HalfSpace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = x[..., :2].sum((1, 2, 3)), x[..., 2:].sum((1, 2, 3))
            return torch.stack([left - right, right - left], 1)

    image = torch.zeros(1, 4, 4)
    image[..., :2], image[..., 2:] = 0.6, 0.4
    images = torch.stack([image, image / 2])
    found = levine_feizi.certify_both(HalfSpace().eval(), Part(images, torch.tensor([0, 0])), 0.02, 2000, 50)
    assert found["classes"] == found["their_classes"] == [0, 0]
    for name in ("relative_w1", "their_w1"):
        assert found[name][0] == pytest.approx(found[name][1], rel=0.1)
        assert 0 < found[name][0] < 0.1  # a tenth of the mass has to cross to the right half
    assert found["relative_w1"][0] > found["their_w1"][0]


def test_seconds_of_each_image() -> None:
    assert throughput.seconds_each(2, 3.0, 4, 5.0) == 1.0
    assert throughput.seconds_each(2, 6.0, 4, 5.0) == 1.25  # another process was busy meanwhile


def test_the_page_says_what_another_commit_made(tmp_path: Path) -> None:
    rows = cifar_rows()
    rows[0]["origin"] = rows[0]["origin"] | {"commit": "1" * 40}
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    text = write_page(tmp_path, "rows.json", "none.json").read_text().replace("\n", " ")
    assert (
        "made up, torch 0, 000000000000; made up, torch 0, 111111111111 (ResNet-20 with Wasserstein noise of sigma 0.5)."
        in text
    )


def cifar_rows() -> list[dict[str, Any]]:
    origin = {"hardware": "made up", "versions": {"torch": "0"}, "commit": "0" * 40, "source_sha256": ""}
    rows = []
    for setting in settings_of("resnet20"):
        row = {"row": "certificates", "part": 0, "samples": 100, "select": 10, "alpha": 0.001, "seconds": 1.0, "origin": origin}
        row |= {"labels": [0, 1, 2, 3], "unsmoothed": [0, 0, 2, 3], "classes": [0, 1, -1, 0]}
        row |= {name: [1.0, 0.2, 0.0, 0.7] for name in ("radii", "w1", "relative_w1", "l2")}
        rows.append(row | setting.key)
    return rows


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"row": "x"}, "row: expected one of training, certificates, plain, published, attack; got 'x'"),
        ({"network": None}, "network: expected one of resnet20"),
        ({"classes": [0, 1, -1]}, "its lists have 3 or 4 images"),
        ({"w1": [1.0, 0.2, "0", 0.7]}, "w1: 3: expected a number of at least 0; got '0'"),
        ({"seconds": 0}, "seconds: expected a number of at least 1e-09; got 0"),
        ({"origin": {"versions": {}}}, "origin: without hardware"),
    ],
)
def test_a_damaged_row_is_named(
    damage: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = cifar_rows()
    rows[1] |= damage
    (tmp_path / "certificates.json").write_text(json.dumps({"rows": rows}))
    assert main(["render", str(tmp_path)], PROGRAM) == 2
    assert f"certificates.json: row 2 is damaged ({message}" in capsys.readouterr().err


def test_a_page_of_cifar(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"rows": cifar_rows()}))
    text = write_page(tmp_path, "rows.json", "none.json").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| white noise | 0.12 |"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[2:9] == [percent(1, 4), percent(2, 4), "25.0", percent(2, 4), percent(1, 4), percent(1, 4), percent(1, 4)]
    assert cells[9:11] == ["0.100", "0.100"]  # the median of 1, 0.2, 0, 0
    assert cells[11] == f"{0.1 / 1.4157:.3f}"  # in the norm of L(1), whose ball is inside that of L2
    assert re.search(r"\| Wasserstein noise \| 1 \|.*\| 0 \| 0\.100 \|", text)
    assert (tmp_path / "resnet20-norms.png").is_file()
    assert Certified(settings_of("resnet20")[0], cifar_rows()[:1]).held("w1") == [1.0, 0.2, -1.0, -1.0]
    assert (tmp_path / "resnet20.png").is_file()


def test_networks_and_schedule() -> None:
    for network, size in (("resnet20", 32), ("resnet18", 32), ("mnist", 28)):
        model = networks.build(network, made_up(size, 1), small=True, seed=0).eval()
        smoothed = networks.Bfloat16(model, batch_size=3, compiled=lambda x, model=model: model(x) + 1).eval()
        x = torch.rand(3, 1, size, size)
        assert torch.allclose(smoothed(x), model(x) + 1, atol=1e-5)  # the batch that it is compiled for
        assert torch.allclose(smoothed(x[:2]), model(x[:2]), atol=1e-5)
        assert smoothed.state_dict().keys() == {f"model.{name}" for name in model.state_dict()}
    full = networks.build("resnet18", made_up(32, 3), small=False, seed=0)
    assert sum(p.numel() for p in full.parameters()) == pytest.approx(11.17e6, rel=0.01)
    rates = [learning_rate(step / 50) for step in range(51)]
    assert max(rates) == rates[10] == 0.4
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)


def test_settings() -> None:
    assert len({setting.name for network in settings.NETWORKS for setting in settings_of(network)}) == 18
    assert Setting("resnet20", "wasserstein", 1.0).metric(8, 8).w1_constant() < 1.45


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["draw"], "the command must be one of run, published, throughput, render"),
        (["run", "--networks", "vgg"], "networks must be among resnet20, resnet18, mnist, each once; got vgg"),
        (["render", "nowhere"], "render needs the rows of a run; got nowhere, without certificates.json"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert main(arguments, PROGRAM) == 2
    assert complaint in capsys.readouterr().err
