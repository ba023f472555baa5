"""Findings of the masking checks, and the one that compares two errors on the same images."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from wassersmooth.robustness.intervals import wilson


@dataclass(frozen=True)
class Finding:
    """One sign of masking.

    Attributes:
        name: its name, such as ``"black_box_beats_white_box"``.
        evidence: one sentence with the numbers.
        numbers: the numbers by name.
    """

    name: str
    evidence: str
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


def compare_errors(name: str, text: str, challenger: str, wrong: Tensor, champion: str, worst: Tensor) -> Finding:
    """The finding that a challenger has a larger error than the champion. # shape of wrong and worst: (B,) bool"""
    low, high = wilson(int(worst.sum()), len(worst))
    evidence = (
        f"{text}: error {percent(wrong):.1f} % ({challenger}) against {percent(worst):.1f} % ({champion}, interval "
        f"{low:.1f} to {high:.1f}) on the same {len(worst)} images"
    )
    numbers = {"error": percent(wrong), "reported": percent(worst), "low": low, "high": high, "images": float(len(worst))}
    return Finding(name, evidence, numbers)


def percent(which: Tensor) -> float:
    """The percentage of images that are True. # shape: (B,) bool -> a number"""
    return 100 * which.double().mean().item()
