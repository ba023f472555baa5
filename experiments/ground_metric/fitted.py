"""The ground metric that was fitted to pairs of MNIST, as a metric of one's own for training: ``own:module:factory``."""

from __future__ import annotations

from pathlib import Path

import torch

import wassersmooth as ws
from experiments import row_store
from experiments.ground_metric.likelihoods import GRAPH_RADIUS
from wassersmooth.study.errors import StudyError

ROWS = Path(__file__).parents[2] / "results" / "ground-metric" / "likelihoods.json"
MOTION = "elastic"


def mnist_metric(height: int, width: int) -> ws.Wasserstein:
    """The weights and the mass that were fitted to elastic pairs with the first seed."""
    rows = [row for row in row_store.read(ROWS)["rows"] if (row["dataset"], row["motion"], row["seed"]) == ("mnist", MOTION, 0)]
    if not rows:
        raise StudyError(f"{ROWS} has no fit to {MOTION} pairs of MNIST; run first: python -m experiments.ground_metric fit")
    weights = torch.tensor(rows[0]["fit"]["weights"], dtype=torch.float64)
    return ws.Wasserstein(ws.PixelGraph.grid(height, width, GRAPH_RADIUS, weight=weights), mass=rows[0]["fit"]["mass"])
