"""`wassersmooth certify`: which noise, what it writes, what it says, and that a killed one continues."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import wassersmooth as ws
from tests.study.small_studies import CPU, SILENT, tiny_study
from wassersmooth.cli import main
from wassersmooth.study import certification, data, experiment
from wassersmooth.study.certification import CertifiedRows, Smoothing
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run, RunFiles

POINTS = ("none", "euclidean-noise:eta=0.2", "reference-noise:eta=0.3,radius=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with three runs."""
    folder = tmp_path_factory.mktemp("certify")
    experiment.train(tiny_study(folder, regularizers=POINTS, epochs=6), "tiny", folder / "study", CPU, SILENT)
    return folder / "study"


FLAGS = ["--samples", "150", "--select", "20", "--test-images", "20", "--device", "cpu"]


def certified(run: Path) -> dict[str, object]:
    return json.loads((run / "certificates.json").read_text())  # type: ignore[no-any-return]


def test_a_study_is_certified_with_the_noise_of_its_training(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", str(trained), *FLAGS]) == 0
    said = capsys.readouterr().out
    assert "none-seed0: left out; its training noise, if any, depends on the image" in said
    white, flow = (
        certified(trained / name) for name in ("euclidean-noise-eta0.2-seed0", "reference-noise-eta0.3-radius1-seed0")
    )
    assert white["smoothings"][0]["sigma"] == 0.2  # type: ignore[index]
    assert white["smoothings"][0]["metric"] == "Euclidean()"  # type: ignore[index]
    assert flow["smoothings"][0]["sigma"] == 0.3  # type: ignore[index]
    assert "radius=1" in flow["smoothings"][0]["metric"]  # type: ignore[index]
    assert "reference='ones'" in flow["smoothings"][0]["metric"]  # type: ignore[index]
    assert not (trained / "none-seed0" / "certificates.json").exists()
    for name in ("certificates.md", "certificates.png"):
        assert (trained / "euclidean-noise-eta0.2-seed0" / name).stat().st_size > 500
    page = (trained / "reference-noise-eta0.3-radius1-seed0" / "certificates.md").read_text()
    assert "create or remove mass are not covered" in page
    assert re.search(r"\| L2 \| 0 \| 0 \| 0 \|", page)
    assert main(["report", str(trained)]) == 0
    shown = (trained / "report.html").read_text()
    assert "Certified accuracy against the radius" in shown
    assert "certified-w1" in shown
    anchors = re.findall(r'<(?:section|figure)[^>]* id="([^"]+)"', shown)
    assert len(anchors) == len(set(anchors)), "a link leads to the first of two"
    figure = shown[shown.index('id="certified-accuracy"') :]
    legend = figure[figure.index('<ul class="legend">') : figure.index("</ul>")]
    assert legend.count("<li>") == 2, "the network without certificates has no curve"
    assert ">sigma 0.3<" not in shown  # one smoothing for each run: color and dashes tell them apart


def test_rows_are_those_of_the_library(trained: Path) -> None:
    run = Run.at(trained / "reference-noise-eta0.3-radius1-seed0")
    assert main(["certify", str(run.folder), *FLAGS]) == 0
    found = certified(run.folder)["smoothings"][0]  # type: ignore[index]
    loaded = data.load(run.config.data, 20)
    metric = ws.Wasserstein(ws.PixelGraph.grid(8, 8, 1), reference="ones")
    own = ws.certify(run.load_model(loaded), loaded.test.images, metric, 0.3, samples=3000)
    certain = ~own.abstained & (torch.tensor(found["classes"]) >= 0)
    assert torch.equal(own.classes[certain], torch.tensor(found["classes"])[certain])
    assert torch.allclose(own.lower, torch.tensor(found["lower"], dtype=torch.float64), atol=0.15)
    assert found["labels"] == loaded.test.labels.tolist()
    assert found["radii"]["w1"] == pytest.approx([r / metric.w1_constant() for r in found["radii"]["metric"]])


def test_it_continues_and_repeats_nothing(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained / "euclidean-noise-eta0.2-seed0"
    monkeypatch.setitem(certification.ROWS, "cpu", 8)
    flags = [*FLAGS, "--sigma", "0.1", "0.4"]
    real, calls = certification.certify, []

    def killed(*arguments: object) -> ws.Certificates:
        if len(calls) == 4:  # in the middle of the second sigma
            raise KeyboardInterrupt
        calls.append(arguments)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(certification, "certify", killed)
    assert main(["certify", str(run), *flags]) == 130
    lines = (run / "certified.jsonl").read_text()
    (run / "certified.jsonl").write_text(lines + '{"first": 8, "rows": [{"cl')  # a line that the kill has cut
    monkeypatch.setattr(certification, "certify", real)
    assert main(["certify", str(run), *flags]) == 0
    continued = certified(run)["smoothings"]
    (run / "certified.jsonl").unlink()
    assert main(["certify", str(run), *flags]) == 0
    assert certified(run)["smoothings"] == continued
    monkeypatch.setattr(certification, "certify", None)  # a third time nothing is left to do
    assert main(["certify", str(run), *flags]) == 0
    assert "sigma 0.4" in capsys.readouterr().out


def test_images_that_are_too_large_for_the_constant_of_w1(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained / "reference-noise-eta0.3-radius1-seed0"
    monkeypatch.setattr("wassersmooth.robustness.certificates.LARGEST_DENSE", 10)
    monkeypatch.setattr("wassersmooth.geometry.metrics.LARGEST_DENSE", 10)
    assert main(["certify", str(run), *FLAGS, "--sigma", "0.1", "0.2"]) == 0
    smoothings = certified(run)["smoothings"]
    assert [set(one["radii"]) for one in smoothings] == [{"metric", "geodesic", "l2"}] * 2  # type: ignore[attr-defined]
    assert main(["report", str(trained)]) == 0
    shown = (trained / "report.html").read_text()
    assert "certified-metric" in shown
    assert ">sigma 0.1<" in shown, "two curves of one run are told apart"
    assert ">sigma 0.2<" in shown


def test_all_images_where_there_are_fewer_than_500(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained / "euclidean-noise-eta0.2-seed0"
    flags = ["--samples", "20", "--select", "5", "--device", "cpu"]
    for most, expected in ((500, 24), (10, 10)):
        monkeypatch.setattr(certification, "IMAGES", most)
        assert main(["certify", str(run), *flags]) == 0
        assert certified(run)["images"] == expected


TWO_IMAGES = ws.Certificates(
    *(torch.tensor([1, -1]), torch.tensor([0.5, 0.0]), torch.tensor([0.9, 0.4]), ws.Euclidean()),
    *(0.1, 100, 10, 0.001, torch.ones(2, 1), 64),
)


def test_rows_of_another_network_or_setting_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "certified.jsonl"
    subject = {"model_sha256": "a", "sigma": 0.1}
    rows = CertifiedRows(path, subject)
    assert rows.known == []
    rows.add(TWO_IMAGES)
    assert [row["class"] for row in CertifiedRows(path, subject).known] == [1, -1]
    assert CertifiedRows(path, subject | {"sigma": 0.2}).known == []


def test_changed_rows_are_certified_again(tmp_path: Path) -> None:
    path = tmp_path / "certified.jsonl"
    rows = CertifiedRows(path, {"sigma": 0.1})
    rows.add(TWO_IMAGES)
    rows.add(TWO_IMAGES)
    stored = path.read_text()
    for old, new in (
        ('"class": 1', '"class": 0'),
        ('"radius": 0.5', '"radius": 5.5'),
        ('"radius": 0.5', '"radius": NaN'),
        ("[{", "[3, {"),
    ):
        changed = stored.rpartition(old)
        path.write_text(changed[0] + new + changed[2])
        assert len(CertifiedRows(path, {"sigma": 0.1}).known) == 2, f"{old} became {new}"
    path.write_text(stored.replace('{"sigma": 0.1}', "[" * 5000))
    assert len(CertifiedRows(path, {"sigma": 0.1}).known) == 4, "each group says what it belongs to"
    assert CertifiedRows(path, {"sigma": 0.2}).known == []
    path.unlink()
    path.mkdir()
    with pytest.raises(StudyError, match=r"certified.jsonl cannot be read \(.*\); fix its permissions"):
        CertifiedRows(path, {"sigma": 0.1})


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("classes", [0], "smoothings: 1: its lists have 1 or 2 images"),
        ("labels", [0, -1], "labels: 2: expected a whole number of at least 0; got -1"),
        ("radii", {"w1": [0.5, 0.1]}, "radii: without metric"),
        ("sigma", "x", "sigma: expected a number of at least 0; got 'x'"),
    ],
)
def test_damaged_certificates_are_named(name: str, value: object, problem: str, tmp_path: Path) -> None:
    smoothing = {"sigma": 0.3, "alpha": 0.001, "labels": [0, 1], "classes": [0, -1]}
    smoothing |= {"radii": {"metric": [0.5, 0.0], "w1": [0.4, 0.0]}}
    for stored in (smoothing, smoothing | {name: value}):
        (tmp_path / "certificates.json").write_text(json.dumps({"smoothings": [stored]}))
        if stored == smoothing:
            assert RunFiles(tmp_path).certificates() == {"smoothings": [smoothing]}
    with pytest.raises(StudyError, match=f"certificates.json is damaged: .*{problem}; move it away and certify again"):
        RunFiles(tmp_path).certificates()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "certify needs the folder of a run or of a study|folders"),
        (["nowhere"], "nowhere does not exist"),
        (["STUDY/none-seed0"], "was trained with none, not with noise that can be certified; give --sigma"),
        (["STUDY", "--sigma", "0"], "sigma must be positive; got 0"),
        (["STUDY", "--alpha", "0.7"], "alpha must be above 0 and below 0.5; got 0.7"),
        (["STUDY", "--samples", "0"], "samples must be at least 1; got 0"),
        (["STUDY", "--radius", "-1"], "radius must be from 0 to 1000000; got -1"),
        (["STUDY", "--radius", "1000001"], "radius must be from 0 to 1000000; got 1000001"),
        (["STUDY", "--sigma", "nan", "0.5"], "sigma must be positive; got nan"),
        (["STUDY/euclidean-noise-eta0.2-seed0", "--mass", "0.1"], "mass belongs to Wasserstein noise"),
    ],
)
def test_bad_input_is_one_line(trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert main(["certify", *(word.replace("STUDY", str(trained)) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(complaint, said), said


def test_the_smoothing_of_flags_and_of_training() -> None:
    smoothing = Smoothing(0.5, 2, 0.1, 100, 10, 0.001)
    metric = smoothing.metric((8, 9))
    assert metric == ws.Wasserstein(ws.PixelGraph.grid(8, 9, 2), mass=0.1, reference="ones")
    assert Smoothing(0.5, 0, 0.0, 100, 10, 0.001).metric((8, 9)) == ws.Euclidean()
