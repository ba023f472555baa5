"""AutoAttack beside its reference implementation: how many images each attack fools, and how long it takes.

Rows are written one by one into a file, and those that are in it, or that another process is measuring, are left alone, so
that a run can be stopped, continued, and shared by several processes. ``parity`` compares the whole ensemble on published
networks, and ``members`` each of its attacks alone; ``speed`` is measured alone on the machine.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from experiments import row_store
from experiments.processes import wait_for
from experiments.row_store import Row
from wassersmooth.normalized import Normalized
from wassersmooth.robustness.apgd import APGD
from wassersmooth.robustness.attacks import AutoAttack
from wassersmooth.robustness.balls import Norm
from wassersmooth.robustness.model_queries import isolated_model, likeliest_wrong_classes
from wassersmooth.robustness.packed_search import StandingImages
from wassersmooth.study import durable
from wassersmooth.study.data import Part
from wassersmooth.study.published_models import load_published
from wassersmooth.study.runs import locked
from wassersmooth.study.stored_json import COUNT, list_of, number, object_of, object_with, one_of, text, whole
from wassersmooth.study.tables import escape_value, markdown_table

PartName = Literal["speed", "parity", "members"]
NetworkName = Literal["euclidean", "wasserstein", "none"]
BallName = Literal["linf 2/255", "linf 8/255", "l2 0.5"]
Fooled = Callable[[], Tensor]  # which images are wrong afterwards. # shape: (n,) bool

KEY = ("part", "network", "ball", "attack", "first")
BALLS: dict[BallName, tuple[float, Norm]] = {
    "linf 2/255": (2 / 255, "linf"),
    "linf 8/255": (8 / 255, "linf"),
    "l2 0.5": (0.5, "l2"),
}
NETWORKS: tuple[NetworkName, ...] = get_args(NetworkName)
MEMBERS = ("apgd-ce", "apgd-t", "fab-t", "square")  # as the reference names them, in our order
ENSEMBLE = "ensemble"
DEFAULT_BATCH = 250  # of the reference
BATCHED = f"ensemble, reference in batches of {DEFAULT_BATCH}"
REFERENCE = "pyautoattack"
BRANCH = 0.1  # the scale of the residual branches of a network with random weights
LARGE_DEPTHS, LARGE_SIZE = (3, 4, 6, 3), 224  # of the ResNet-50 and its images
SEED = 0
TITLES = {"none": "none", "euclidean": "Euclidean", "wasserstein": "Wasserstein"}
TITLES |= {"resnet20": "ResNet-20", "resnet50": "ResNet-50"}
ROW = object_with(
    {
        "part": one_of(*get_args(PartName)),
        "network": one_of(*TITLES),
        **dict.fromkeys(("ball", "attack", "reference"), text),
        "images": whole(1),
        "epsilon": number(0, 1e6),
        "pixels": list_of(whole(1)),
        "wrong": object_of(COUNT, ("clean", "ours", "reference")),
        "seconds": object_of(number(1e-9, 1e9), ("ours", "reference")),
        "origin": object_with({"hardware": text, "torch": text}),
    },
    {"first": whole(1)},
)


@dataclass(frozen=True)
class Case:
    """One row to measure: both implementations on the same images."""

    part: PartName
    network: str
    ball: str
    attack: str
    first: int = 0  # of the images, where those before it have a row of their own

    def key(self) -> tuple[str | int | None, ...]:
        return (self.part, self.network, self.ball, self.attack, self.first or None)


def cases(
    parts: Sequence[PartName], networks: Sequence[str] = NETWORKS, balls: Sequence[str] = tuple(BALLS), first: int = 0
) -> list[Case]:
    """What there is to measure, the most important first; of parity, the images from the first on."""
    speed = [Case("speed", "resnet20", "linf 2/255", ENSEMBLE), Case("speed", "resnet50", "half survive", ENSEMBLE)]
    speed += [Case("speed", "resnet20", "linf 2/255", BATCHED)]
    published = [(network, ball) for ball in balls for network in networks]
    parity = [Case("parity", *pair, ENSEMBLE, first) for pair in published]
    members = [Case("members", *pair, member) for pair in published for member in MEMBERS]
    return [case for case in speed + parity + members if case.part in parts]


@dataclass(frozen=True)
class Counts:
    """How many images there are for a case."""

    images: int = 1000
    member_images: int = 100
    speed_images: int = 500
    large_images: int = 32

    def of(self, case: Case) -> int:
        if case.part == "speed":
            return self.large_images if case.network == "resnet50" else self.speed_images
        return self.images if case.part == "parity" else self.member_images


def missing(output: Path, todo: Sequence[Case]) -> list[Case]:
    """The cases of which the file has no row."""
    done = row_store.keys(output, KEY)
    return [case for case in todo if case.key() not in done]


def measure(
    output: Path,
    todo: Sequence[Case],
    data: Part,
    counts: Counts,
    models: Path,
    device: torch.device,
    origin: Row,
    until: float,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Measure the cases that the file lacks and no other process has, add a row for each, and begin none after ``until``."""
    durable.make_folder(output.parent)
    for place, case in enumerate(todo, 1):
        if time.time() > until or not missing(output, [case]):
            continue
        key = {column: value for column, value in zip(KEY, case.key(), strict=True) if value is not None}
        name = ", ".join(map(str, key.values()))
        lock = output.with_suffix(f".{name.replace(', ', '-').replace('/', '-').replace(' ', '-')}.lock")
        with locked(lock) as mine:
            if not mine or not missing(output, [case]):
                continue
            say(f"{place} of {len(todo)}: {name}")
            row: Row = key | measure_case(case, data, counts.of(case), models, device)
            row["origin"] = origin
            row_store.add(output, [row], KEY)
        lock.unlink(missing_ok=True)  # from now on the row says that it is done
        yield row


def measure_case(case: Case, data: Part, count: int, models: Path, device: torch.device) -> Row:
    """Both implementations, ours first; the reference has all images in one batch, its fastest way, or its default batches."""
    ball: tuple[float, Norm]
    if case.network == "resnet50":
        model, part = large_case(count, device)
        ball = (epsilon_that_half_survive(model, part), "linf")
    else:
        name = "euclidean" if case.network == "resnet20" else case.network
        model = load_published(models / f"{name}.safetensors").to(device).eval()
        some = slice(case.first, case.first + count)
        part = Part(data.images[some], data.labels[some]).to(device)
        ball = BALLS[cast(BallName, case.ball)]
    with torch.no_grad():
        clean = model(part.images).argmax(1) != part.labels
    warm_up(model, part, ball)
    attack, batch = (ENSEMBLE, DEFAULT_BATCH) if case.attack == BATCHED else (case.attack, len(part))
    ours, our_seconds = timed(lambda: own(model, part, ball, attack), device)
    theirs, their_seconds = timed(lambda: reference(model, part, ball, attack, batch), device)
    return {
        "epsilon": ball[0],
        "norm": ball[1],
        "images": len(part),
        "pixels": list(part.images.shape[1:]),
        "wrong": {"clean": int(clean.sum()), "ours": int(ours.sum()), "reference": int(theirs.sum())},
        "wrong_in_both": int((ours & theirs).sum()),
        "seconds": {"ours": our_seconds, "reference": their_seconds},
        "reference": reference_version(),
    }


def own(model: nn.Module, part: Part, ball: tuple[float, Norm], attack: str) -> Tensor:
    """Which images our attack leaves wrong. # shape: (n,) bool"""
    generator = torch.Generator(part.images.device).manual_seed(SEED)
    images, labels = part.images, part.labels
    whole = AutoAttack(*ball)
    if attack == ENSEMBLE:
        found = whole(model, images, labels, generator)
    else:
        with isolated_model(model, images) as inner:
            with torch.no_grad():
                outputs = inner(images)
            search, targeted = list(whole.members(outputs.shape[1]))[MEMBERS.index(attack)]
            alone = StandingImages(inner, images, labels, outputs.argmax(1) == labels, generator)
            alone.attack(search, likeliest_wrong_classes(outputs, labels, 9) if targeted else None)
            found = torch.where(alone.stands[:, None, None, None], images, alone.found)
    return wrong(model, found, labels)


def reference(model: nn.Module, part: Part, ball: tuple[float, Norm], attack: str, batch_size: int) -> Tensor:
    """Which images the reference's attack leaves wrong. # shape: (n,) bool"""
    package = importlib.import_module(REFERENCE)
    epsilon, norm = ball
    ensemble = package.AutoAttack(
        lambda images: model(images).clone(),  # the package writes into the scores
        eps=epsilon,
        norm={"linf": "Linf", "l2": "L2"}[norm],
        seed=SEED,
        version="standard",
        device=part.images.device,
    )
    if attack != ENSEMBLE:
        ensemble.attacks_to_run = [attack]
    logging.getLogger("auto-attack").setLevel(logging.ERROR)
    trace = sys.gettrace()
    try:
        found = ensemble.run_standard_evaluation(part.images, part.labels, batch_size=batch_size)[0]
    finally:
        sys.settrace(trace)  # the package replaces it
    return wrong(model, found, part.labels)


def wrong(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(images).argmax(1) != labels
        return found


def warm_up(model: nn.Module, part: Part, ball: tuple[float, Norm]) -> None:
    """A few iterations, so that libraries are loaded before anything is timed."""
    few = slice(0, max(2, len(part) // 2))
    with isolated_model(model, part.images) as inner:
        everything = torch.ones(len(part.labels[few]), dtype=torch.bool, device=part.images.device)
        StandingImages(inner, part.images[few], part.labels[few], everything, None).attack(APGD(*ball, iterations=5))


def timed(call: Fooled, device: torch.device) -> tuple[Tensor, float]:
    wait_for(device)
    start = time.perf_counter()
    found = call()  # its last pass reads values, which waits for the device
    wait_for(device)
    return found, time.perf_counter() - start


class Bottleneck(nn.Module):
    """A block of the ResNet-50: convolutions of 1, 3 and 1 pixels beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        layers: list[nn.Module] = []
        for inner, outer, size, step in shapes:
            norm = nn.BatchNorm2d(outer)
            layers += [nn.Conv2d(inner, outer, size, step, size // 2, bias=False), norm, nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        nn.init.constant_(norm.weight, BRANCH)
        self.skip: nn.Module = nn.Identity()
        if channels != 4 * width:
            self.skip = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def bottlenecks(depths: Sequence[int]) -> nn.Module:
    """A network of so many blocks of each width."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(channels, 64 * 2**stage, 2 if stage and not block else 1))
            channels = 256 * 2**stage
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def large_case(count: int, device: torch.device) -> tuple[nn.Module, Part]:
    """A ResNet-50 with random weights, smooth random images of 224 pixels, and its own predictions as labels.

    Its batch norms get their statistics from the images: without any, the scores of all images would be alike. Its residual
    branches are scaled down: at full size its scores are so steep that no radius above rounding leaves half of the images.
    """
    torch.manual_seed(SEED)
    network = bottlenecks(LARGE_DEPTHS)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the average over all passes
    coarse = torch.rand(count, 3, LARGE_SIZE // 8, LARGE_SIZE // 8, generator=torch.Generator().manual_seed(SEED))
    images = nn.functional.interpolate(coarse, size=(LARGE_SIZE, LARGE_SIZE), mode="bilinear").to(device)
    model = Normalized(network, 0.5, 0.25).to(device).train()
    with torch.no_grad():
        for first in range(0, count, 32):
            model(images[first : first + 32])
        model.eval()
        labels = torch.cat([model(images[first : first + 32]).argmax(1) for first in range(0, count, 32)])
        return model, Part(images, labels)


def epsilon_that_half_survive(model: nn.Module, part: Part) -> float:
    """A radius at which APGD, shortened, fools about half of the images: first on the cross-entropy, then with targets too."""
    low, high = 1e-4 / 255, 16 / 255
    for turn in range(16):
        middle = math.sqrt(low * high)
        with isolated_model(model, part.images) as inner:
            everything = torch.ones_like(part.labels, dtype=torch.bool)
            generator = torch.Generator(part.images.device).manual_seed(SEED)
            attacked = StandingImages(inner, part.images, part.labels, everything, generator)
            attacked.attack(APGD(middle, "linf", iterations=25))
            if turn >= 12:
                with torch.no_grad():
                    targets = likeliest_wrong_classes(inner(part.images), part.labels, 9)
                attacked.attack(APGD(middle, "linf", "targeted_dlr", iterations=25), targets)
        low, high = (low, middle) if int(attacked.stands.sum()) < len(part) // 2 else (middle, high)
        if turn == 11:
            low = high / 2  # with targets, a smaller radius does as much
    return math.sqrt(low * high)


def reference_version() -> str:
    try:
        return version(REFERENCE)
    except PackageNotFoundError:  # its files alone are on the path
        return "unknown"


def row_line(row: Row) -> str:
    """A row as a line on the screen."""
    counts, seconds = row["wrong"], row["seconds"]
    return (
        f"{row['part']} {row['network']}, {row['ball']}, {row['attack']}: "
        f"of {row['images']} images wrong {counts['clean']} clean, "
        f"{counts['ours']} ours ({seconds['ours']:.1f} s), {counts['reference']} reference ({seconds['reference']:.1f} s)"
    )


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of the page, by the name of their block; those without rows are left out."""
    found = {}
    if parity := [row for row in rows if row["part"] in ("parity", "members")]:
        found["autoattack_parity"] = _parity(parity)
    if speed := [row for row in rows if row["part"] == "speed"]:
        found["autoattack_speed"] = _speed(speed)
    return found


def _parity(rows: Sequence[Row]) -> str:
    """A line for each network and ball: wrong images after all attacks, then after each alone, ours and the reference's."""
    parts = []
    for attacks, what in (((ENSEMBLE,), "all attacks"), (MEMBERS, "each attack alone")):
        measured = [row for row in rows if row["attack"] in attacks]
        cells = {(row["network"], row["ball"], row["attack"]): row for row in _added_up(measured)}
        if not cells:
            continue
        most = max(row["images"] for row in cells.values())
        lines = [["network, ball", "clean", *attacks], ["---", *["---:"] * (1 + len(attacks))]]
        for ball in BALLS:
            for network in NETWORKS:
                found = {attack: cells[network, ball, attack] for attack in attacks if (network, ball, attack) in cells}
                if found:
                    first = next(iter(found.values()))
                    pairs = [_pair(found[attack]) if attack in found else "-" for attack in attacks]
                    notes = [f"{first['images']} images"] if first["images"] < most else []
                    notes += [f"in {first['rows']} parts"] if first["rows"] > 1 else []
                    note = f" ({', '.join(notes)})" if notes else ""
                    lines.append([f"{TITLES[network]}, {ball}{note}", str(first["wrong"]["clean"]), *pairs])
        apart = max(abs(row["wrong"]["ours"] - row["wrong"]["reference"]) for row in cells.values())
        unless = ", unless it says otherwise," if any(row["images"] < most for row in cells.values()) else ""
        said = f"Wrong of {most} images{unless} after {what}, ours / reference; {apart} apart at most."
        parts += [markdown_table(lines), "", f"{said} {_where(measured)}.", ""]
    return "\n".join(parts)


def _added_up(rows: Sequence[Row]) -> list[Row]:
    """Rows of the same case whose images follow one another, as one; what comes after a gap waits for what fills it."""
    whole: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.get("first", 0)):
        key = row_store.key_of(row, KEY[:-1])
        before = whole.get(key, {"images": 0, "rows": 0, "wrong": dict.fromkeys(row["wrong"], 0)})
        if row.get("first", 0) == before["images"]:
            wrong = {name: before["wrong"][name] + count for name, count in row["wrong"].items()}
            more = {"images": before["images"] + row["images"], "rows": before["rows"] + 1, "wrong": wrong}
            whole[key] = row | more
    return list(whole.values())


def _speed(rows: Sequence[Row]) -> str:
    head = ["network", "images", "epsilon", "wrong, ours / reference", "seconds, ours", "reference", "times faster"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        ours, theirs = row["seconds"]["ours"], row["seconds"]["reference"]
        name = f"{TITLES[row['network']]}, {'x'.join(map(str, row['pixels']))}{row['attack'].removeprefix(ENSEMBLE)}"
        cells = [name, f"{row['images']}", f"{255 * row['epsilon']:.3g}/255", _pair(row)]
        lines.append([*cells, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}"])
    return "\n".join([markdown_table(lines), "", f"Unless it says otherwise, all images in one batch. {_where(rows)}."])


def _pair(row: Row) -> str:
    return f"{row['wrong']['ours']} / {row['wrong']['reference']}"


def _where(rows: Sequence[Row]) -> str:
    """On what it was measured, as the rows say."""
    origins = {(row["origin"]["hardware"], row["origin"]["torch"], row["reference"]) for row in rows}
    return escape_value(
        "; ".join(f"{hardware}, torch {torch_}, {REFERENCE} {used}" for hardware, torch_, used in sorted(origins))
    )
