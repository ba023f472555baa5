"""The page and its plots, from the rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from experiments.certificates import stored_rows
from experiments.certificates.settings import CIFAR_SIGMAS, NETWORKS, TITLES, Setting, settings_of
from experiments.markdown import paragraph, table
from experiments.row_store import Row
from wassersmooth.robustness.intervals import wilson
from wassersmooth.study import durable, figures
from wassersmooth.study.tables import DASH, counted, escape_value, short_commit

NETWORK_TITLES = {"resnet20": "ResNet-20", "resnet18": "ResNet-18", "mnist": "MNIST network"}
W1_RADII = (0.1, 0.25, 0.5, 1.0)
RELATIVE_RADII = (0.01, 0.02, 0.05)
# The medians that Levine and Feizi print for flows of this standard deviation, in units of the mass (AISTATS 2020, MNIST).
LEVINE_FEIZI = {0.005: 0.0101, 0.01: 0.0132, 0.02: 0.0095}
MASS = 100.0  # of a digit, about: their flow of 0.01 is a pixel's standard deviation of 2
COLORS = {"euclidean": ("#9ecae1", "#4292c6", "#084594"), "wasserstein": ("#fdae6b", "#e6550d", "#7f2704")}

NOT_CERTIFIED = """\
## What is not certified

- Perturbations that create or remove mass: white noise, brightness, clipping, JPEG, rounding to 8 bits. They are outside the
  range of `L(1)`, and no radius covers them. A mass term m would, with the small L2 radius `sqrt(m) R`.
- Images that leave [0, 1] are covered by the radii in the metric and in W1, and not by the geodesic ones.
- The network itself: the certificate is for its vote over noise, which costs 10,100 forward passes for each image (11,000 on
  MNIST).
- All images at once: alpha is for each image.
- Rounding: the theorem is about real numbers, and the networks run in bfloat16, which is the function that is certified.
"""


@dataclass(frozen=True)
class Certified:
    """The certificates of one setting, over all of its images."""

    setting: Setting
    rows: Sequence[Row]

    def values(self, name: str) -> list[Any]:
        """What the rows hold of each image; in the norm of L(1), white noise has a ball inside that of L2."""
        if name == "norm":
            factor = 1 / _largest_eigenvalue() ** 0.5 if self.setting.noise == "euclidean" else 1.0
            return [factor * value for value in self.values("radii")]
        return [value for row in sorted(self.rows, key=lambda row: row["part"]) for value in row[name]]

    @property
    def images(self) -> int:
        return len(self.values("labels"))

    @property
    def right(self) -> list[bool]:
        return [found == label for found, label in zip(self.values("classes"), self.values("labels"), strict=True)]

    def held(self, unit: str) -> list[float]:
        """The radius of each image, -1 where the class is wrong or not certain."""
        return [value if right else -1.0 for value, right in zip(self.values(unit), self.right, strict=True)]

    @property
    def vote(self) -> tuple[str, str]:
        """The error of the vote, and the share of images without a certain class, in percent."""
        uncertain = sum(value < 0 for value in self.values("classes"))
        return percent(self.right.count(False), self.images), f"{100 * uncertain / self.images:.1f}"

    def accuracy(self, radius: float, unit: str) -> str:
        count = sum(value >= radius for value in self.held(unit))
        return percent(count, self.images)

    def median(self, unit: str) -> float:
        """Over all images, 0 for those that are wrong or not certain."""
        return statistics.median(max(0.0, value) for value in self.held(unit))


def write_page(folder: Path, rows: str, speed: str) -> Path:
    """Write the page and the plots beside the rows."""
    stored, timed = stored_rows.read(folder / rows), stored_rows.read_speed(folder / speed)
    certified = [found for network in NETWORKS for found in certificates(stored, network)]
    lines = ["# Certificates", "", *_head(stored), *_reading(certified)]
    for network in ("resnet20", "resnet18"):
        mine = [one for one in certified if one.setting.network == network]
        if mine:
            title = NETWORK_TITLES[network]
            lines += [f"## CIFAR-10, {title}", "", *_cifar_table(mine, _plain(stored, network)), ""]
            durable.write(folder / f"{network}.png", curves_png(mine, {"w1": "W1 radius (mass x pixels)"}))
            lines += [f"![Certified accuracy of {title} against the W1 radius.]({network}.png)", ""]
            norms = {"norm": "radius in the norm of L(1)", "l2": "L2 radius"}
            durable.write(folder / f"{network}-norms.png", curves_png(mine, norms))
            lines += [f"![Certified accuracy of {title} against the radius in L(1) and in L2.]({network}-norms.png)", ""]
    mine = [one for one in certified if one.setting.network == "mnist"]
    if mine:
        lines += ["## MNIST, beside Levine and Feizi", "", *_mnist_table(mine, _plain(stored, "mnist")), ""]
        durable.write(folder / "mnist.png", curves_png(mine, {"relative_w1": "W1 radius / mass (pixels)"}))
        lines += ["![Certified accuracy on MNIST against the W1 radius relative to the mass.](mnist.png)", ""]
    published = [row for row in stored if row["row"] == "published"]
    if published:
        lines += ["## The networks of Levine and Feizi", "", *_published_table(published), ""]
    attacks = [row for row in stored if row["row"] == "attack"]
    if attacks:
        lines += ["## The smoothed networks under attack", "", *_attack_table(attacks), ""]
    if timed:
        lines += ["## Speed", "", *_speed_table(timed, certified), ""]
    lines.append(NOT_CERTIFIED)
    page = folder / "certificates.md"
    durable.write_text(page, "\n".join(lines))
    return page


def certificates(stored: Sequence[Row], network: str) -> list[Certified]:
    """The settings of a network that have rows, in the order of noise and sigma."""
    found = []
    for setting in sorted(settings_of(network), key=lambda one: (one.noise, one.sigma)):
        rows = [r for r in stored if r["row"] == "certificates" and all(r[k] == v for k, v in setting.key.items())]
        if rows:
            found.append(Certified(setting, rows))
    return found


def percent(count: int, images: int) -> str:
    """Percent with Wilson's interval."""
    low, high = wilson(count, images)
    return f"{100 * count / images:.1f} ({low:.0f} to {high:.0f})"


@cache
def _largest_eigenvalue() -> float:
    """Of L(1) on 32x32 pixels with four neighbors: an L2 ball of radius R holds that of L(1) of radius R / its root."""
    metric = Setting("resnet20", "wasserstein", 1.0).metric(32, 32)
    matrix = metric.cometric(torch.ones(1, 1, 32, 32, dtype=torch.float64)).as_matrix()
    return float(torch.linalg.eigvalsh(matrix[0])[-1])


def _head(stored: Sequence[Row]) -> list[str]:
    return [
        *paragraph(
            "How far from a test image the vote of a network over noise cannot change, with probability 1 - alpha for each",
            "image: white noise (Cohen et al., 2019) and noise of covariance `sigma^2 L(1)` on the graph of the four nearest",
            "neighbors ([maths](../../docs/maths.md), section 9). That graph has the smallest constant between its norm and W1",
            "of all that were tried. In unit scale a pixel of both noises has the standard deviation sigma. Each network is",
            "trained on its own noise, with one seed; all are measured on the same test images, chosen by content. Intervals",
            "are Wilson's 95 % over the images, and say nothing about other seeds.",
        ),
        *paragraph(
            f"{_origins(stored)}. The commands are in [experiments/certificates](../../experiments/certificates/README.md)."
        ),
    ]


def _origins(stored: Sequence[Row]) -> str:
    """Machine, version and commit of most rows; those of others with what they made."""
    made: dict[str, list[Row]] = {}
    for row in stored:
        origin = row["origin"]
        commit = short_commit(origin.get("commit") or origin.get("source_sha256"))
        made.setdefault(f"{origin['hardware']}, torch {origin['versions']['torch']}, {commit}", []).append(row)
    texts: list[str] = []
    for origin, rows in sorted(made.items(), key=lambda item: -len(item[1])):
        subjects = dict.fromkeys(_subject(row) for row in sorted(rows, key=_subject) if row["row"] != "training")
        texts.append(origin + (f" ({', '.join(subjects)})" if texts else ""))
    return escape_value("; ".join(texts))


def _subject(row: Row) -> str:
    if row["row"] == "published":
        return "the networks of Levine and Feizi"
    noise = f"with {TITLES[row['noise']]} of sigma {row['sigma']:g}" if row["noise"] in TITLES else "without noise"
    return f"{NETWORK_TITLES[row['network']]} {noise}"


def _plain(stored: Sequence[Row], network: str) -> str:
    """A sentence on the network that is trained without noise; "" where it is not measured."""
    for row in stored:
        if row["row"] == "plain" and row["network"] == network:
            wrong = sum(a != b for a, b in zip(row["unsmoothed"], row["labels"], strict=True))
            error = percent(wrong, len(row["labels"]))
            return f"Trained in the same way without noise, it is wrong on {error} % of these images."
    return ""


def _reading(certified: Sequence[Certified]) -> list[str]:
    """The sigma with the largest median W1 radius of each noise, network by network, in words."""
    found = []
    for network, title in NETWORK_TITLES.items():
        unit, digits = ("relative_w1", 4) if network == "mnist" else ("w1", 2)
        best = {}
        for noise in TITLES:
            mine = [one for one in certified if (one.setting.network, one.setting.noise) == (network, noise)]
            if mine:
                best[noise] = max(mine, key=lambda one: one.median(unit))
        if len(best) == len(TITLES):
            found.append(
                f"{title} "
                + " and ".join(
                    f"{best[noise].median(unit):.{digits}f} with {TITLES[noise]} (sigma {best[noise].setting.sigma:g}, "
                    f"{100 * best[noise].right.count(False) / best[noise].images:.1f} % errors)"
                    for noise in reversed(TITLES)
                )
            )
    if not found:
        return []
    return paragraph(
        f"**In short.** The largest median W1 radius (on MNIST, over the mass) of the three sigmas: {'; '.join(found)}. White",
        "noise covers every perturbation of its L2 radius, Wasserstein noise only those that conserve each channel's mass.",
    )


def _cifar_table(found: Sequence[Certified], plain: str) -> list[str]:
    first, rows = found[0].rows[0], []
    root = _largest_eigenvalue() ** 0.5
    text = paragraph(
        f"{counted(found[0].images, 'image')}, {first['samples']:,} draws and {first['select']} to select the class, alpha",
        f"{first['alpha']:g}. Errors and certified accuracies in percent; an image without a certain class is an error of",
        "the vote. Medians are over all images, 0 where the class is wrong or not certain. The L2 radius of Wasserstein",
        "noise is 0: no L2 ball conserves mass. An L2 ball of radius R holds that of L(1) of radius",
        f"R / {root:.3f}. The error of the network is that without noise, which it was not trained for. {plain}",
    )
    for one in found:
        wrong = sum(a != b for a, b in zip(one.values("unsmoothed"), one.values("labels"), strict=True))
        cells = [TITLES[one.setting.noise], f"{one.setting.sigma:g}", percent(wrong, one.images), *one.vote]
        cells += [one.accuracy(radius, "w1") for radius in W1_RADII]
        white = one.setting.noise == "euclidean"
        rows.append(
            [*cells, f"{one.median('w1'):.3f}", f"{one.median('l2'):.3f}" if white else "0", f"{one.median('norm'):.3f}"]
        )
    head = ["noise", "sigma", "error of the network", "error of its vote", "no class certain"]
    head += [*(f"certified at W1 {radius:g}" for radius in W1_RADII), "median W1", "median L2", "median in L(1)"]
    return [*text, *table(head, rows)]


def _mnist_table(found: Sequence[Certified], plain: str) -> list[str]:
    first, rows = found[0].rows[0], []
    text = paragraph(
        "Radii are W1 over the mass of the image, with the Euclidean distance of pixels: their unit. As theirs:",
        f"{first['select']:,} draws to select, {first['samples']:,} to bound, alpha {first['alpha']:g};",
        f"{counted(found[0].images, 'image')} here, all of the test images there. They add Laplace noise of standard",
        "deviation s to the flows of an image of mass 1, which at a mass of 100 is a pixel's standard deviation of 200 s;",
        "the sigmas here are those of s = 0.005, 0.01, 0.02, whatever the mass. The networks differ, too. An image without",
        f"a certain class is an error; medians are over all images, 0 where the class is wrong or not certain. {plain}",
    )
    for one in found:
        printed = LEVINE_FEIZI.get(one.setting.sigma / (2 * MASS)) if one.setting.noise == "wasserstein" else None
        cells = [TITLES[one.setting.noise], f"{one.setting.sigma:g}", *one.vote]
        cells += [one.accuracy(radius, "relative_w1") for radius in RELATIVE_RADII]
        rows.append([*cells, f"{one.median('relative_w1'):.4f}", DASH if printed is None else f"{printed:.4f}"])
    head = ["noise", "sigma", "error of its vote", "no class certain"]
    head += [*(f"certified at {radius:g}" for radius in RELATIVE_RADII), "median radius", "printed by Levine and Feizi"]
    return [*text, *table(head, rows)]


def _published_table(found: Sequence[Row]) -> list[str]:
    """Both certificates on the same networks, images and numbers of draws."""
    first, rows = found[0], []
    flows = sorted({row["sigma"] for row in found})
    images = sum(len(row["labels"]) for row in found if row["sigma"] == flows[0])
    text = paragraph(
        f"Here the networks are theirs (their published checkpoints), too, with {counted(images, 'image')} of MNIST,",
        f"{first['select']:,} draws to select, {first['samples']:,} to bound, alpha {first['alpha']:g}, and the same unit.",
        "Theirs: Laplace noise of standard deviation s on the flows of the image of mass 1, and their formula. Ours:",
        "Gaussian noise of covariance `sigma^2 L(1)` with sigma = 2 s times the mass, so that a pixel has the same",
        "variance; sigma may depend on the mass, which every covered perturbation conserves. Errors and medians as above.",
    )
    for flow in flows:
        mine = sorted((row for row in found if row["sigma"] == flow), key=lambda row: row["part"])
        errors, shares, medians = [], [], []
        for classes, radii in (("their_classes", "their_w1"), ("classes", "relative_w1")):
            triples = [t for row in mine for t in zip(row[classes], row["labels"], row[radii], strict=True)]
            held = [radius if answer == label else -1.0 for answer, label, radius in triples]
            errors.append(percent(sum(value < 0 for value in held), len(held)))
            shares.append(percent(sum(value >= 0.02 for value in held), len(held)))
            medians.append(f"{statistics.median(max(0.0, value) for value in held):.4f}")
        rows.append([f"{flow:g}", *errors, *shares, *medians, f"{LEVINE_FEIZI[flow]:.4f}"])
    head = (
        "s",
        "error, theirs",
        "error, ours",
        "certified at 0.02, theirs",
        "ours",
        "median radius, theirs",
        "ours",
        "printed",
    )
    return [*text, *table(head, rows)]


def _attack_table(found: Sequence[Row]) -> list[str]:
    first, rows = found[0], []
    text = paragraph(
        f"`WassersteinPGD`, or `PGD` in L2 for white noise, with {first['steps']} steps through {first['draws']} draws of",
        "the noise in each (`ws.Smoothed`), on images with the right class, in groups of 8 by radius, with epsilon",
        f"{first['inside']:g} and {first['outside']:g} times the smallest radius of the group. Fooled: the vote of",
        f"{first['checked']:,} new draws has another class.",
    )
    for row in sorted(found, key=lambda row: (NETWORKS.index(row["network"]), row["noise"])):
        used = statistics.median(row["used_of_radius"]) if row["used_of_radius"] else 0.0
        cells = [NETWORK_TITLES[row["network"]], TITLES[row["noise"]], f"{row['sigma']:g}"]
        rows.append([*cells, *(str(row[name]) for name in ("images", "fooled_inside", "fooled_outside")), f"{used:.2f}"])
    share = "share of the radius used inside, median"
    return [*text, *table(("network", "noise", "sigma", "images", "fooled inside", "fooled outside", share), rows)]


def _speed_table(found: Sequence[Row], certified: Sequence[Certified]) -> list[str]:
    timed = {row["network"] for row in found}
    counts = {row["samples"] + row["select"] for one in certified if one.setting.network in timed for row in one.rows}
    draws = max(counts, default=0)
    rates = sorted(row["certify"] for row in found)
    origin, rows = found[0]["origin"], []
    machine = escape_value(f"{origin['hardware']}, torch {origin['versions']['torch']}")
    text = paragraph(
        f"Noisy images per second, alone on the machine ({machine}): the",
        "forward pass of the model alone at that batch size, on images that are there already, the best of five rounds,",
        "launched eagerly and as a CUDA graph; and `ws.certify`. Preparations are what a call costs beside its draws: the",
        "factor of the covariance, checks, the capture.",
        f"The {draws:,} draws of an image take {draws / rates[-1]:.3f} to {draws / rates[0]:.3f} s." if draws else "",
    )
    for row in found:
        cells = [NETWORK_TITLES[row["network"]], escape_value(row["way"]), TITLES[row["noise"]], f"{row['batch']:,}"]
        cells += [f"{row['bare']:,.0f}", f"{row['certify']:,.0f}", f"{100 * row['certify'] / row['bare']:.0f} %"]
        rows.append([*cells, f"{row['preparations']:.2f} s"])
    return [*text, *table(("network", "model", "noise", "batch", "model alone", "certify", "share", "preparations"), rows)]


def curves_png(found: Sequence[Certified], labels: Mapping[str, str]) -> bytes:
    """Certified accuracy against the radius, a panel for each unit and a curve for each noise and sigma."""
    drawing = figures.new_figure((6.4 if len(labels) == 1 else 4.4 * len(labels), 3.8), "the curves of certified accuracy")
    for place, (unit, label) in enumerate(labels.items(), 1):
        axes = drawing.add_subplot(1, len(labels), place)
        _draw(axes, found, unit)
        axes.set(ylim=(0, 100), xlabel=label, ylabel="certified accuracy (%)" if place == 1 else "")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    return figures.to_chart_png(drawing, 150)


def _draw(axes: Any, found: Sequence[Certified], unit: str) -> None:
    """The curves that reach beyond a radius of 0."""
    top = max(max(one.held(unit)) for one in found)
    for one in (each for each in found if max(each.held(unit)) > 0):
        held = sorted(one.held(unit))
        radii = [0.0, *(value for value in held if value > 0)]
        shares = [100 * sum(value >= radius for value in held) / len(held) for radius in radii]
        sigmas = sorted(each.setting.sigma for each in found if each.setting.noise == one.setting.noise)
        shade = COLORS[one.setting.noise][min(sigmas.index(one.setting.sigma), len(CIFAR_SIGMAS["euclidean"]) - 1)]
        dashes = "-" if one.setting.noise == "wasserstein" else (0, (4, 1.5))
        name = f"{TITLES[one.setting.noise]}, sigma {one.setting.sigma:g}"
        axes.step([*radii, radii[-1]], [*shares, 0.0], where="pre", color=shade, ls=dashes, lw=1.6, label=name)
    axes.set_xlim(0, 1.03 * top if top > 0 else 1.0)
