"""The page and its plot, from the rows alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments import row_store
from experiments.row_store import Row
from experiments.wasserstein_attacks.measuring import NETWORKS, OURS, TITLES, smallest
from wassersmooth.robustness.intervals import wilson
from wassersmooth.study import durable, figures
from wassersmooth.study.errors import StudyError
from wassersmooth.study.stored_json import COUNT, list_of, number, object_with, optional, text
from wassersmooth.study.tables import escape_value, markdown_table, short_commit

PICTURE = "wasserstein_attacks.png"
SIZES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # of the table, in exact W1
COLORS = {OURS: "#d62728", "FrankWolfe": "#1f77b4", "PlanPGD": "#2ca02c", "SinkhornPGD": "#7f7f7f"}
HOW = (
    "Sizes are exact Wasserstein-1 distances in pixels between images of unit mass (0.1: a tenth of the mass moves by one "
    "pixel), by the network simplex of POT. Every attacked image is moved back along a straight line until it just fools the "
    "network. An image counts as robust at a size if no run of the attack, at any of its epsilons, has fooled the network "
    "within that size."
)
_SIZE = number(0, 1e6)
_ROW = object_with(
    {
        "network": text,
        "attack": text,
        "epsilon": _SIZE,
        "images": COUNT,
        "iterations": COUNT,
        "sizes": list_of(optional(_SIZE)),
        "reached": list_of(optional(_SIZE)),
        "mass_drift": _SIZE,
        "seconds": _SIZE,
        "origin": object_with({"hardware": text, "torch": text, "commit": text, "command": text, "dataset": text}),
    }
)


def write_page(folder: Path, name: str) -> Path:
    """Write the page and the plot beside the rows."""
    rows = read_rows(folder / name)
    path = folder / Path(name).with_suffix(".md").name
    durable.write(folder / PICTURE, picture(rows))
    durable.write_text(path, page(rows))
    return path


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, checked."""
    rows: list[Row] = row_store.read(path)["rows"]
    if not rows:
        raise StudyError(f"{path} has no rows; measure first: python -m experiments.wasserstein_attacks run")
    for place, row in enumerate(rows, 1):
        damage = _ROW(row)
        if not damage and (row["network"] not in NETWORKS or row["attack"] not in TITLES):
            damage = f"expected a known network and attack; got {row['network']!r} and {row['attack']!r}"
        if not damage and not len(row["sizes"]) == len(row["reached"]) == row["images"]:
            damage = "expected as many sizes as images"
        if damage:
            raise row_store.damaged(path, place, damage)
    return rows


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    first = rows[0]
    origin = first["origin"]
    parts = [
        "# Attacks that move mass, beside those of the literature",
        "",
        f"{first['images']} test images of {escape_value(origin['dataset'])}, {first['iterations']} steps of each attack, a "
        f"window of 5 by 5 pixels, one network of each kind. The attacks of the literature are our own implementations. {HOW}",
        "",
        answer(rows),
        "",
        f"![Robust accuracy against exact W1, for each attack]({PICTURE})",
        "",
    ]
    for network in NETWORKS:
        found = by_attack(rows, network)
        if found:
            parts += [f"## Network: {NETWORKS[network]}", "", *_table(found), "", *_comparison(found), ""]
    parts += [
        "Each attack: its epsilons, how much of epsilon the exact W1 uses before moving back (median over fooled images, at "
        "the largest epsilon), the largest relative change of an image's mass, and the time, roughly: the machine was shared.",
        "",
        _details(rows),
        "",
        f"{_where(rows)}.",
        "",
    ]
    return "\n".join(parts)


def _where(rows: Sequence[Row]) -> str:
    """On what the rows were measured: machines, versions and commits."""
    origins = [row["origin"] for row in rows]
    found = {f"{origin['hardware']}, torch {origin['torch']}, commit {short_commit(origin['commit'])}" for origin in origins}
    return escape_value("; ".join(sorted(found)))


def by_attack(rows: Sequence[Row], network: str) -> dict[str, list[float]]:
    """The smallest size for each image, by attack, in the order of the titles."""
    found = {}
    for attack in TITLES:
        of_attack = [row for row in rows if (row["network"], row["attack"]) == (network, attack)]
        if of_attack:
            found[attack] = smallest(of_attack)
    return found


def answer(rows: Sequence[Row]) -> str:
    """Which attack is strongest, and by how much, for each network."""
    sentences = []
    for network in NETWORKS:
        found = by_attack(rows, network)
        medians = {attack: statistics.median(sizes) for attack, sizes in found.items()}
        if len(medians) < 2:
            continue
        best, *others = sorted(medians, key=lambda attack: medians[attack])
        rest = ", ".join(
            f"{TITLES[attack]} {_number(medians[attack])}{_times(medians[attack], medians[best])}" for attack in others
        )
        title, size = NETWORKS[network].capitalize(), _number(medians[best])
        sentences.append(f"**{title}**: half of the images fall to {TITLES[best]} within {size} pixels; {rest}.")
        left = {attack: sum(size > SIZES[-1] for size in found[attack]) / len(found[attack]) for attack in (best, *others)}
        if left[best] > min(left.values()):
            first, *behind = sorted(left, key=lambda attack: left[attack])
            shares = ", ".join(f"{TITLES[attack]} {100 * left[attack]:.0f} %" for attack in behind)
            strongest = f"{TITLES[first]} leaves {100 * left[first]:.0f} % of the images"
            sentences.append(f"At large sizes the order is another: within {SIZES[-1]:g} pixels {strongest}, {shares}.")
    return " ".join(sentences)


def _times(size: float, best: float) -> str:
    return f" ({size / best:.2f} times)" if best > 0 and math.isfinite(size) else ""


def _table(found: dict[str, list[float]]) -> list[str]:
    lines = [["attack", *(f"W1 {size:g}" for size in SIZES), "median size"], ["---", *["---:"] * (len(SIZES) + 1)]]
    for attack, sizes in found.items():
        cells = [_share(sum(size > limit for size in sizes), len(sizes)) for limit in SIZES]
        lines.append([TITLES[attack], *cells, _number(statistics.median(sizes))])
    return ["Robust accuracy in percent, with its 95 % interval:", "", markdown_table(lines)]


def _comparison(found: dict[str, list[float]]) -> list[str]:
    """Image by image: on how many ours needs less, and the median ratio of the sizes."""
    if OURS not in found:
        return []
    lines = []
    for attack, sizes in found.items():
        pairs = [(a, b) for a, b in zip(found[OURS], sizes, strict=True) if min(a, b) > 0 and math.isfinite(min(a, b))]
        if attack != OURS and pairs:
            smaller = sum(a < b for a, b in pairs)
            ratio = statistics.median(b / a if math.isfinite(a) else 0.0 for a, b in pairs)
            lines.append(
                f"- Against {TITLES[attack]}: ours needs less on {smaller} of {len(pairs)} images; the median of its size over "
                f"ours is {_number(ratio)}."
            )
    return lines


def _details(rows: Sequence[Row]) -> str:
    head = ["network, attack", "epsilons", "W1 / epsilon", "mass", "seconds per image and run"]
    lines = [head, ["---", "---", "---:", "---:", "---:"]]
    for network in NETWORKS:
        for attack in TITLES:
            mine = [row for row in rows if (row["network"], row["attack"]) == (network, attack)]
            found = sorted(mine, key=lambda row: float(row["epsilon"]))
            if not found:
                continue
            used = [size / found[-1]["epsilon"] for size in found[-1]["reached"] if size]
            share = f"{statistics.median(used):.2f}" if used else "-"
            seconds = statistics.median(row["seconds"] / row["images"] for row in found)
            drift = max(row["mass_drift"] for row in found)
            sizes = ", ".join(f"{row['epsilon']:g}" for row in found)
            lines.append([f"{NETWORKS[network]}, {TITLES[attack]}", sizes, share, f"{drift:.0e}", f"{seconds:.3f}"])
    return markdown_table(lines)


def _share(count: int, images: int) -> str:
    low, high = wilson(count, images)
    return f"{100 * count / images:.1f} ({low:.0f}-{high:.0f})"


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "more than was tried"


def row_line(row: Row) -> str:
    """A row as a line on the screen."""
    fooled = [size for size in row["sizes"] if size is not None]
    return (
        f"{NETWORKS[row['network']]}, {row['attack']} at {row['epsilon']:g}: {len(fooled)} of {row['images']} images fooled, "
        f"median W1 {statistics.median(fooled) if fooled else math.nan:.3f}, {row['seconds']:.1f} s"
    )


def picture(rows: Sequence[Row]) -> bytes:
    """Robust accuracy against exact W1, a panel for each network."""
    networks = [network for network in NETWORKS if by_attack(rows, network)]
    drawing = figures.new_figure((4.6 * len(networks), 4.0), "the plot of transport attacks")
    right = max(SIZES)
    for place, network in enumerate(networks, 1):
        axes = drawing.add_subplot(1, len(networks), place)
        for attack, sizes in by_attack(rows, network).items():
            steps = [0.0, *sorted(size for size in sizes if size <= right), right]
            shares = [100 * sum(size > step for size in sizes) / len(sizes) for step in steps]
            axes.step(steps, shares, where="post", color=COLORS[attack], lw=1.6, label=TITLES[attack])
        axes.set(xlim=(0, right), ylim=(0, 100), xlabel="exact W1, pixels", title=f"network: {NETWORKS[network]}")
        axes.grid(True, color="#dddddd", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            axes.set_ylabel("robust accuracy, %")
            named = axes.get_legend_handles_labels()
    drawing.legend(*named, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figures.to_chart_png(drawing, 130)
