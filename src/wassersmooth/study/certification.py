"""Certified radii of trained runs (``wassersmooth certify``): rows as they are certified, then JSON, a page and a plot.

A killed certification continues: each image is a line of ``certified.jsonl``, below a line that says what it belongs to.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein
from wassersmooth.robustness.certificates import UNIT_TITLES, Certificates, Unit, certify, units_of
from wassersmooth.study import acceleration, data, durable, figures, provenance
from wassersmooth.study.config import Data, Machine
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset, Part
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import RunStoppedError, StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import CERTIFICATES, CERTIFIED, Run
from wassersmooth.study.stored_json import one_line, parse
from wassersmooth.study.tables import escape_value

IMAGES = 500  # at most, of the test set, by content, where no number is asked for
ROWS = {"cpu": 25, "cuda": 250}  # images that are certified between two writes
SEED = 0
LIMITS = """\
Each radius holds with probability 1 - alpha, for the vote of the network over noise and not for the network itself. Without a
mass term, perturbations that create or remove mass are not covered: brightness, clipping, white noise. Geodesic radii are for
images in [0, 1].
"""


@dataclass(frozen=True)
class Smoothing:
    """What is certified.

    Attributes:
        sigma: the size of the noise.
        radius, mass: of the graph of Wasserstein noise; radius 0 is white noise.
    """

    sigma: float
    radius: int
    mass: float
    samples: int
    select: int
    alpha: float

    def metric(self, size: tuple[int, int]) -> Metric:
        if not self.radius:
            return Euclidean()
        return Wasserstein(PixelGraph.grid(*size, self.radius), mass=self.mass, reference="ones")


def noise_of(point: Regularizer) -> tuple[float, int, float] | None:
    """Sigma, radius and mass of the noise that a run was trained with; None where it is none that can be certified."""
    if point.kind not in ("euclidean-noise", "reference-noise"):
        return None
    return point.eta, point.radius, point.mass


def certify_runs(
    runs: Sequence[Run],
    console: Console,
    wanted: Mapping[Path, Sequence[Smoothing]],
    images: int | None,
    data_dir: Path | None,
    device: str,
    batch_size: int,
    precision: str,
) -> None:
    """Certify each run with each of its smoothings; what is there already is not certified again.

    Arguments:
        images: of the test set; None for 500, or all where there are fewer.
    """
    where = choose_device(device)
    known: dict[Data, Dataset] = {}
    acceleration.apply_settings(Machine(precision=precision))  # type: ignore[arg-type]
    with console.bars():
        for run in runs:
            source = run.config.data if data_dir is None else dataclasses.replace(run.config.data, data_dir=data_dir)
            if source not in known:
                known[source] = _loaded(source, images)
            loaded = known[source]
            model = run.load_model(loaded).to(where)
            with run.measuring() as mine:
                if not mine:
                    raise StudyError(f"{run.folder} is being measured by another process; wait for it")
                _certify_run(run, model, loaded.test.to(where), wanted[run.folder], console, batch_size, precision)


def _loaded(source: Data, images: int | None) -> Dataset:
    found = data.load(source, images)
    return found if images is not None or len(found.test) <= IMAGES else data.load(source, IMAGES)


def _certify_run(
    run: Run,
    model: nn.Module,
    part: Part,
    smoothings: Sequence[Smoothing],
    console: Console,
    batch_size: int,
    precision: str,
) -> None:
    device, size = part.images.device, (part.images.shape[-2], part.images.shape[-1])
    subject = {"model_sha256": provenance.file_sha256(run.folder / "model.safetensors")}
    subject |= {"test_sha256": provenance.tensor_sha256(part.images), "precision": precision}
    found, drawn, group = [], [], ROWS[device.type]
    for smoothing in smoothings:
        named = subject | dataclasses.asdict(smoothing)
        rows, metric = CertifiedRows(run.folder / CERTIFIED, named), smoothing.metric(size)
        counts = (smoothing.samples, smoothing.select, smoothing.alpha)
        task = console.task(f"certifying {run.name}, sigma {smoothing.sigma:g}", len(part), len(rows.known))
        for start in range(len(rows.known), len(part), group):
            # One seed for each group of images, so that a certification that continues draws what it would have drawn.
            seed = zlib.crc32(f"{SEED} {smoothing.sigma!r} {smoothing.radius} {start}".encode())
            images = part.images[start : start + group]
            try:
                generator = torch.Generator().manual_seed(seed)
                certified = certify(model, images, metric, smoothing.sigma, *counts, batch_size, generator)
            except ValueError as error:  # the library's messages are one line with a remedy already
                raise RunStoppedError(f"{run.folder}: {error}") from error
            rows.add(certified)
            task.update(len(rows.known), f"{sum(row['class'] >= 0 for row in rows.known)} with a certain class")
        columns = (torch.tensor([row[name] for row in rows.known], device=device) for name in ("class", "radius", "lower"))
        classes, radii, lower = columns
        about = (metric, smoothing.sigma, *counts, part.images.double().sum((2, 3)), math.prod(size))
        whole = Certificates(classes, radii.double(), lower.double(), *about)
        drawn.append(whole)
        found.append(_record(whole, part.labels, smoothing))
        accuracy = whole.accuracy(part.labels, 0.0).percent
        console.line(f"{run.name}, sigma {smoothing.sigma:g}: {_median_line(whole, part.labels)}, accuracy {accuracy:.1f} %")
    record = {**subject, "images": len(part), "smoothings": found, "certified": provenance.origin(device)}
    page = [f"# Certificates of {escape_value(run.name)}", "", LIMITS, *(one.to_markdown(part.labels) for one in drawn)]
    page.append("![Certified accuracy against the radius.](certificates.png)\n")
    durable.write(run.folder / "certificates.png", _curves(drawn, part.labels))
    durable.write_text(run.folder / "certificates.md", "\n".join(page))
    durable.write_json(run.folder / CERTIFICATES, record)  # last: this file marks the certification as complete
    console.line(f"page: {run.folder / 'certificates.md'}")


def _record(found: Certificates, labels: Tensor, smoothing: Smoothing) -> dict[str, Any]:
    """What certificates.json holds of a smoothing."""
    return {
        **dataclasses.asdict(smoothing),
        "metric": repr(found.metric),
        "labels": labels.tolist(),
        "classes": found.classes.tolist(),
        "lower": found.lower.tolist(),
        "radii": {unit: found.in_unit(unit).tolist() for unit in units_of(found.metric)},
        "geodesic_free": found.geodesic(free=True).tolist(),
    }


def _median_line(found: Certificates, labels: Tensor) -> str:
    unit: Unit = "w1" if "w1" in units_of(found.metric) else "metric"
    held = torch.where(found.classes == labels, found.in_unit(unit), 0.0)
    return f"median certified radius {float(held.median()):.3g} in {UNIT_TITLES[unit]}"


def _curves(found: Sequence[Certificates], labels: Tensor) -> bytes:
    """Certified accuracy against the radius, in the metric and, where its constant is known, in W1."""
    drawing = figures.new_figure((8.4, 3.4), "the plot of certified accuracy")
    units = [unit for unit in units_of(found[0].metric) if unit in ("metric", "w1")]
    for place, unit in enumerate(units, 1):
        axes = drawing.add_subplot(1, len(units), place)
        tops = [one.plot(labels, unit, axes).get_xlim()[1] for one in found]
        axes.set_xlim(0, max(tops))
        axes.set_title(UNIT_TITLES[unit], loc="left", fontsize=10)
        axes.legend(frameon=False)
    return figures.to_png(drawing, 150)


class CertifiedRows:
    """The rows of one network, one set of images and one smoothing, in the order of the images, in a file that others share.

    Arguments:
        path: the file.
        subject: hashes of the network and of the images, and the settings.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self.path, self.subject = path, dict(subject)
        self.known = self._read()
        self._named = False

    def _read(self) -> list[dict[str, Any]]:
        """The groups that fit together from the first image on; a line that was cut or changed is certified again."""
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            remedy = "fix its permissions, or move it away to certify everything again"
            raise StudyError(f"{self.path} cannot be read ({one_line(error)}); {remedy}") from None
        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                entry = parse(line)
                if entry["first"] == len(rows) and entry["crc32"] == self._checksum(len(rows), entry["rows"]):
                    rows += entry["rows"]
            except (ValueError, KeyError, TypeError):
                continue
        return rows

    def _checksum(self, first: int, rows: object) -> int:
        """Of a group and of what it belongs to, so that neither can be changed without the other."""
        return zlib.crc32(json.dumps([self.subject, first, rows], sort_keys=True).encode())

    def add(self, found: Certificates) -> None:
        """Append the next images."""
        columns = (found.classes.tolist(), found.lower.tolist(), found.radii.tolist())
        new = [{"class": c, "lower": low, "radius": r} for c, low, r in zip(*columns, strict=True)]
        if not self._named:
            durable.append_line(self.path, "\n" + json.dumps({"subject": self.subject}))  # ends a line that a kill has cut
            self._named = True
        first = len(self.known)
        durable.append_line(self.path, json.dumps({"first": first, "rows": new, "crc32": self._checksum(first, new)}))
        self.known += new
