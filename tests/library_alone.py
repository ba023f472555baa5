"""Use the library where only torch, numpy and their requirements can be imported: a program that test_packaging.py runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def requirements(names: set[str]) -> set[str]:
    """Return the distributions with everything that pip installs along with them."""
    found: set[str] = set()
    while names - found:
        name = (names - found).pop()
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # needed on another system
            continue
        names = names | {spelled_alike(re.split(r"[^\w.-]", line)[0]) for line in lines if "extra ==" not in line}
    return found


def spelled_alike(name: str) -> str:
    return name.lower().replace("-", "_")


KEPT = requirements({"torch", "numpy"}) | {"wassersmooth"}
HIDDEN = {name for name, owners in metadata.packages_distributions().items() if not KEPT & set(map(spelled_alike, owners))}


class TorchAndNumpyFinder(PathFinder):
    """Find no other package than those two, their requirements and the one under test."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)


def main() -> None:
    sys.meta_path = [TorchAndNumpyFinder if finder is PathFinder else finder for finder in sys.meta_path]
    import torch

    import wassersmooth as ws
    from wassersmooth import cli

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Softplus(), torch.nn.Flatten(), torch.nn.Linear(2 * 36, 4))
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8) % 4
    objective = ws.GradientPenalty(ws.Wasserstein(ws.PixelGraph.grid(8, 8, radius=2)), eta=0.3)
    objective(model, images, labels).total.backward()
    ws.FastGradients(objective, model, compile=False)(images, labels)
    ws.attacks.PGD(8 / 255, step=2 / 255, iterations=2)(model, images, labels)
    print(ws.evaluate(model, images, labels, suite="quick"))
    cli.main(["--version"])
    raise SystemExit(cli.main([]))


if __name__ == "__main__":
    main()
