"""A regularizer as a value: what is written on the command line, what a run folder is called, and the objective it means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from wassersmooth.geometry.graph import RADIUS, PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein
from wassersmooth.learning.attacked import Attack
from wassersmooth.learning.dual_norm import DualNorm
from wassersmooth.learning.engines import EngineName
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.terms import Objective
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.robustness.attacks import FGSM, PGD, WassersteinFGSM
from wassersmooth.study.errors import StudyError

KINDS = {
    "none": "the plain loss",
    "euclidean": "loss + eta^2 |grad|^2",
    "wasserstein": "loss + eta^2 <grad, L(x) grad>, L(x) on a pixel graph of the given radius, plus mass * identity",
    "uniform": "as wasserstein, with x replaced by its mean: the control that does not see the image",
    "dual-norm": "loss + eta^2 (pi/2) |grad|_1^2 / N: the penalty made against L-infinity attacks",
    "euclidean-length": "loss + eta |grad|, the length itself: the most that a perturbation of length eta adds to first order",
    "wasserstein-length": "loss + eta <grad, L(x) grad>^(1/2), likewise",
    "dual-length": "loss + eta ((pi/2) / N)^(1/2) |grad|_1, likewise for L-infinity ones of size eta (pi/2N)^(1/2)",
    "tikhonov": "loss + (eta^2 / 2) tr(L(x) Hess loss), one random probe: the paper's theorem with its Laplacian term",
    "tikhonov-curvature": "without that term: (eta^2 / 2) sum_cd l''_cd <grad f_c, L(x) grad f_d>, likewise",
    "tikhonov-euclidean": "tikhonov with the identity in place of L(x)",
    "euclidean-noise": "the loss at x + eta * white noise",
    "wasserstein-noise": "the loss at x + eta * noise of covariance L(x)",
    "adversarial": "the loss at an FGSM example with epsilon = eta, in pixel units",
    "l2-adversarial": "the loss after one L2 step of length eta",
    "pgd7": "the loss after 7 PGD steps of eta / 4 in the L-infinity ball of eta, from a random start",
    "wasserstein-adversarial": "the loss after one step of length eta in the Wasserstein metric, in closed form",
}
ON_A_GRAPH = (
    *("wasserstein", "uniform", "wasserstein-length", "tikhonov", "tikhonov-curvature"),
    *("wasserstein-noise", "wasserstein-adversarial"),
)
LENGTHS = ("euclidean-length", "wasserstein-length", "dual-length")
PENALTIES = ("euclidean", "wasserstein", "uniform", "dual-norm", *LENGTHS)
ATTACKS = ("adversarial", "l2-adversarial", "pgd7", "wasserstein-adversarial")


@dataclass(frozen=True)
class Regularizer:
    """One point of a study. ``str()`` and :meth:`parse` are inverses: ``wasserstein:eta=0.3,radius=2``, ``pgd7:eta=8/255``.

    ``PENALTY+ATTACK`` is a kind too: the penalty of strength eta, taken at images attacked with epsilon.
    """

    kind: str
    eta: float = 0.0
    radius: int = 0
    mass: float = 0.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS and not (self.parts[0] in PENALTIES and self.parts[1] in ATTACKS):
            joined = f"or PENALTY+ATTACK of {', '.join(PENALTIES)} and {', '.join(ATTACKS)}"
            raise StudyError(f"regularizer must be one of {', '.join(KINDS)}; {joined}; got {self.kind!r}")
        for name, value in (("eta", self.eta), ("mass", self.mass), ("epsilon", self.epsilon)):
            if not 0 <= value < math.inf:
                raise StudyError(f"{name} must be a finite number of at least 0; got {value:g} in {self}")
        on_graph = any(part in ON_A_GRAPH for part in self.parts)
        if on_graph and self.radius < 1:
            got = f"radius={self.radius} in {self}"
            raise StudyError(f"{self.kind} needs a radius of at least 1 pixel; got {got}; write {self.kind}:eta=0.3,radius=2")
        if not on_graph and (self.radius or self.mass):
            raise StudyError(f"radius and mass belong to {', '.join(ON_A_GRAPH)}; got {self}; leave them out")
        if (self.kind == "none") != (self.eta == 0):
            remedy = "leave its eta out" if self.kind == "none" else f"write for example {self.kind}:eta=0.3"
            raise StudyError(f"eta is positive for every regularizer but none; got {self}; {remedy}")
        if bool(self.parts[1]) != (self.epsilon > 0):
            raise StudyError(
                f"epsilon is the size of the attack in PENALTY+ATTACK, positive there and nowhere else; got {self}; "
                "write for example wasserstein+l2-adversarial:eta=0.3,radius=2,epsilon=0.25"
            )

    @property
    def parts(self) -> tuple[str, str]:
        """The kind, or the penalty, and the attack that it is taken under, if any."""
        first, _, second = self.kind.partition("+")
        return first, second

    @property
    def can_grow(self) -> bool:
        """Whether eta is a strength that a ramp may fill epoch by epoch; the size of an attack is not."""
        return self.parts[0] not in ("none", *ATTACKS)

    @classmethod
    def parse(cls, text: str) -> Regularizer:
        """Reads ``kind`` or ``kind:eta=...,radius=...,mass=...,epsilon=...``; a number may be a ratio, ``8/255``.

        Without a radius, a graph has the usual one.
        """
        kind, _, rest = text.partition(":")
        readers: dict[str, Callable[[str], float]] = {"eta": _number, "radius": int, "mass": _number, "epsilon": _number}
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            name, _, number = part.partition("=")
            if name not in readers or name in values:
                raise StudyError(
                    f"a regularizer is KIND:eta=NUMBER,radius=PIXELS,mass=NUMBER,epsilon=NUMBER, each once; got {text!r}"
                )
            try:
                values[name] = readers[name](number)
            except ValueError:
                expected = "a whole number" if name == "radius" else "a number, such as 0.3 or 8/255"
                raise StudyError(f"{name} must be {expected}; got {number!r} in {text!r}") from None
        if any(part in ON_A_GRAPH for part in kind.split("+")):
            values.setdefault("radius", RADIUS)
        return cls(kind, **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        parts = [f"{name}={_written(value)}" for name, value in values.items() if value]
        return f"{self.kind}:{','.join(parts)}" if parts else self.kind

    @property
    def slug(self) -> str:
        """The name as a part of a folder's name: ``wasserstein-eta0.3-radius2``, ``pgd7-eta8_255``."""
        return str(self).replace(":", "-").replace(",", "-").replace("=", "").replace("/", "_")

    def metric(self, height: int, width: int) -> Metric:
        """The metric it penalizes in; Euclidean where there is no graph."""
        if self.parts[0] not in ON_A_GRAPH:
            return Euclidean()
        return Wasserstein(PixelGraph.grid(height, width, self.radius), mass=self.mass, uniform=self.parts[0] == "uniform")

    def objective(self, size: tuple[int, int], engine: EngineName, eta: float | Tensor | None = None) -> Objective:
        """What is minimized.

        Arguments:
            size: height and width of the images.
            engine: how a gradient penalty is differentiated.
            eta: in place of this regularizer's own, such as a tensor that a ramp fills epoch by epoch. Attacks keep theirs.
        """
        strength = self.eta if eta is None else eta
        kind, under = self.parts
        if kind == "none":
            return Plain()
        if kind in ATTACKS:
            return AdversarialTraining(self._attack(kind, self.eta, size))
        metric = self.metric(*size)
        if kind.startswith("tikhonov"):
            return Tikhonov(metric, strength, laplacian=None if kind == "tikhonov-curvature" else "additive")
        if kind.endswith("-noise"):
            return NoisyInputs(metric, strength)
        measured = DualNorm() if kind in ("dual-norm", "dual-length") else metric
        penalty = GradientPenalty(measured, strength, engine=engine, power=1 if kind in LENGTHS else 2)
        return AdversarialTraining(self._attack(under, self.epsilon, size), penalty=penalty) if under else penalty

    def _attack(self, kind: str, epsilon: float, size: tuple[int, int]) -> Attack:
        if kind == "adversarial":
            return FGSM(epsilon)
        if kind == "pgd7":
            return PGD(epsilon, epsilon / 4, 7)
        if kind == "l2-adversarial":
            return PGD(epsilon, epsilon, 1, norm="l2", random_start=False)
        metric = Wasserstein(PixelGraph.grid(*size, self.radius), mass=self.mass)
        return WassersteinFGSM(metric, epsilon, limited=bool(self.parts[1]))  # the closed form may leave [0, 1]


def readable(value: float) -> str:
    """A strength for a label: ``8/255``, or four digits."""
    text = _written(value)
    return text if "/" in text else f"{value:.4g}"


def _written(value: float) -> str:
    """The shortest text that is read as exactly this number."""
    if isinstance(value, int):
        return str(value)
    level = [f"{round(255 * value)}/255"] if 0 < value < 1 else []
    return next((text for text in (f"{value:g}", *level) if _number(text) == value), repr(value))


def _number(text: str) -> float:
    above, slash, below = text.partition("/")
    if not slash:
        return float(text)
    divisor = float(below)
    if divisor == 0 or not math.isfinite(divisor):
        raise ValueError(f"cannot divide by {below}")
    return float(above) / divisor
