"""The work on one network: for every setting train, certify, attack. Each piece is a row; rows that exist are skipped."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wassersmooth as ws
from experiments import row_store
from experiments.certificates import networks, stored_rows
from experiments.certificates.settings import Scale, Setting, plain_of, settings_of
from experiments.certificates.training import train
from wassersmooth.study import provenance
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset

KEY = ("row", "network", "noise", "sigma", "part")
PART = 250  # images of a row of certificates: what a kill may lose
GROUP = 8  # images that are attacked with one epsilon
INSIDE, OUTSIDE = 0.95, 4.0  # epsilons of the attack, in certified radii


@dataclass
class NetworkWork:
    """One network and its settings, on one device.

    Arguments:
        deadline: a value of ``time.perf_counter()`` after which nothing new is begun.
    """

    network: str
    data: Dataset
    scale: Scale
    rows: Path
    small: bool
    compile: bool
    console: Console
    deadline: float = float("inf")
    model: nn.Module = field(init=False)
    forward: Callable[[Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        device = self.data.train.images.device
        built = networks.build(self.network, self.data, self.small, seed=0).to(device)
        self.model = built.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.initial = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.forward = torch.compile(self.model, dynamic=False) if self.compile else self.model
        self.loaded: Setting | None = None
        torch.backends.cudnn.benchmark = device.type == "cuda"
        self.smoothed_model = networks.Bfloat16(self.model, self.scale.batches[self.network], self.forward)

    def run(self) -> bool:
        """Do what is missing, the attacks last; whether everything is done."""
        self.finished: set[tuple[Any, ...]] = row_store.keys(self.rows, KEY)
        settings = settings_of(self.network)
        work = [(setting, "certificates") for setting in settings]
        work += [(plain_of(self.network), "plain")]
        work += [(setting, "attack") for setting in settings[2:4]]  # those of the smallest sigmas
        for setting, kind in work:
            parts = range(0, len(self.data.test), PART) if kind == "certificates" else (None,)
            for part in [part for part in parts if self._key(setting, kind, part) not in self.finished]:
                if time.perf_counter() >= self.deadline:
                    return False
                self._trained(setting)
                if part is not None:
                    self._certify(setting, part)
                elif kind == "plain":
                    labels = self.data.test.labels.tolist()
                    self._add(setting, kind, None, {"labels": labels, "unsmoothed": self._predicted(self.data.test.images)})
                else:
                    self._attack(setting)
        return True

    def _trained(self, setting: Setting) -> None:
        """Put the weights of a setting into the model."""
        if self.loaded == setting:
            return
        self.model.load_state_dict(self.initial)
        seconds = train(setting, self.model, self.forward, self.data, self.scale, self.rows.parent / "networks")
        self.smoothed_model.eval()
        self.loaded = setting
        if self._key(setting, "training", None) not in self.finished:
            self._add(setting, "training", None, {"seconds": seconds, "epochs": self.scale.epochs[self.network]})
            self.console.line(f"{setting.name}: trained in {seconds:.1f} s")

    def _key(self, setting: Setting, kind: str, part: int | None) -> tuple[Any, ...]:
        return row_store.key_of({"row": kind, "part": part} | setting.key, KEY)

    def _add(self, setting: Setting, kind: str, part: int | None, content: dict[str, Any]) -> None:
        device = self.data.train.images.device
        row = {"row": kind, "part": part} | setting.key | content | {"origin": provenance.origin(device)}
        row_store.add(self.rows, [row], KEY)
        self.finished.add(self._key(setting, kind, part))

    def _certify(self, setting: Setting, start: int) -> None:
        images, labels = (tensor[start : start + PART] for tensor in (self.data.test.images, self.data.test.labels))
        metric = setting.metric(*self.data.size)
        started = time.perf_counter()
        found = ws.certify(
            *(self.smoothed_model, images, metric, setting.sigma),
            samples=self.scale.samples,
            select=setting.select,
            alpha=setting.alpha,
            batch_size=self.scale.batches[self.network],
            generator=torch.Generator().manual_seed(zlib.crc32(f"{setting.name} {start}".encode())),
        )
        seconds = time.perf_counter() - started
        self._add(
            *(setting, "certificates", start),
            {
                "samples": self.scale.samples,
                "select": setting.select,
                "alpha": setting.alpha,
                "metric": repr(metric),
                "seconds": seconds,
                "labels": labels.tolist(),
                "unsmoothed": self._predicted(images),
                "classes": found.classes.tolist(),
                "lower": [round(value, 9) for value in found.lower.tolist()],
                "radii": [round(value, 9) for value in found.radii.tolist()],
                "w1": [round(value, 9) for value in found.w1().tolist()],
                "relative_w1": [round(value, 12) for value in found.w1(relative=True).tolist()],
                "geodesic_free": [round(value, 9) for value in found.geodesic(free=True).tolist()],
                "l2": [round(value, 9) for value in found.l2().tolist()],
                "masses": [round(value, 6) for value in images.double().sum((1, 2, 3)).tolist()],
            },
        )
        self.console.line(f"{setting.name}: images {start} to {start + len(images)} certified in {seconds:.1f} s")

    @torch.no_grad()
    def _predicted(self, images: Tensor) -> list[int]:
        """The classes of the network itself, without noise."""
        return [label for some in torch.split(images, PART) for label in self.smoothed_model(some).argmax(1).tolist()]

    def _attack(self, setting: Setting) -> None:
        """Attack certified images through the noise, inside their radius and far outside of it."""
        stored = [row for row in stored_rows.read(self.rows) if row["row"] == "certificates"]
        mine = sorted((row for row in stored if all(row[k] == v for k, v in setting.key.items())), key=lambda row: row["part"])
        classes, radii, labels = (
            torch.tensor([value for row in mine for value in row[name]]) for name in ("classes", "radii", "labels")
        )
        right = ((classes == labels) & (radii > 0)).nonzero()[:, 0][: self.scale.attacked]
        order = right[radii[right].argsort()]
        metric = setting.metric(*self.data.size)
        device = self.data.train.images.device
        started = time.perf_counter()
        fooled = {"inside": 0, "outside": 0}
        lengths: list[float] = []
        for group in torch.split(order, GROUP) if len(order) else ():
            images, true = self.data.test.images[group.to(device)], labels[group].to(device)
            radius = float(radii[group].min())
            for where, factor in (("inside", INSIDE), ("outside", OUTSIDE)):
                target = ws.Smoothed(self.smoothed_model, metric, setting.sigma, self.scale.draws, seed=None, batch_size=2000)
                torch.manual_seed(0)
                epsilon = factor * radius
                attack: Any = ws.attacks.PGD(epsilon, 2.5 * epsilon / self.scale.steps, self.scale.steps, norm="l2")
                if isinstance(metric, ws.Wasserstein):
                    attack = ws.attacks.WassersteinPGD(metric, epsilon, self.scale.steps)
                attacked = attack(target.eval(), images, true, torch.Generator(device).manual_seed(0))
                judge = ws.Smoothed(self.smoothed_model, metric, setting.sigma, self.scale.checked, seed=1, batch_size=5000)
                with torch.no_grad():
                    fooled[where] += int((judge.eval()(attacked).argmax(1) != true).sum())
                if where == "inside":
                    moved = (attacked - images).double()
                    used = metric.cometric(images.double()).norm_sq(moved - _leak(moved, setting))
                    lengths += (used.sqrt() / radius).tolist()
        self._add(
            *(setting, "attack", None),
            {
                "images": len(order),
                "fooled_inside": fooled["inside"],
                "fooled_outside": fooled["outside"],
                "inside": INSIDE,
                "outside": OUTSIDE,
                "used_of_radius": [round(value, 4) for value in lengths],
                "steps": self.scale.steps,
                "draws": self.scale.draws,
                "checked": self.scale.checked,
                "seconds": time.perf_counter() - started,
            },
        )
        self.console.line(f"{setting.name}: {fooled} of {len(order)} attacked images are fooled")


def _leak(moved: Tensor, setting: Setting) -> Tensor:
    """The mass that rounding to float32 has added to a channel, which has no finite length."""
    return moved.mean((2, 3), keepdim=True) if setting.noise == "wasserstein" else torch.zeros_like(moved)
