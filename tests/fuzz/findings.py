"""What a finder has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Findings:
    """How often each kind of outcome was seen, and the faults, each with what repeats it.

    Attributes:
        show: called with each fault as it is found.
        most: a finder stops after so many.
    """

    show: Callable[[str], None] = print
    most: int = 20
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, fault: str) -> None:
        self.failures.append(fault)
        self.show(f"--- {fault}")

    @property
    def enough(self) -> bool:
        return len(self.failures) >= self.most
