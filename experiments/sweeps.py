"""What a training step costs where nobody has timed it: passes over the network."""

from __future__ import annotations

from wassersmooth.study.regularizers import ATTACKS, Regularizer


def attack_steps(point: Regularizer) -> int:
    """How many gradient steps the attack in a training step takes: 0 for none, also at random points."""
    used = [part for part in point.parts if part in ATTACKS]
    return 0 if not used else 7 if used[0] == "pgd7" else 1


def sweeps(point: Regularizer) -> int:
    """Passes over the network in a training step: forward, input gradient, weight gradient and their tangents, one each."""
    penalized = point.kind != "none" and point.parts[0] not in ATTACKS
    points = 2 if point.parts[1] == "linearity" else 1
    return points * (6 if penalized else 3) + 2 * attack_steps(point)
