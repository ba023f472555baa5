"""Regularizers: the table of all kinds, and one point of a study as a value.

A new kind is one entry of :data:`KINDS`: the command line, reports and plots take what they need from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from wassersmooth.geometry.coherent_motion import Deformations, Motion
from wassersmooth.geometry.graph import RADIUS, PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein
from wassersmooth.learning.attack_runner import Attack
from wassersmooth.learning.covector_norms import DualNorm
from wassersmooth.learning.engines import EngineName
from wassersmooth.learning.losses import Loss
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.random_points import DisplacedPenalty, LocalLinearity
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.robustness.attacks import FGSM, PGD, WassersteinFGSM
from wassersmooth.study import own_code
from wassersmooth.study.errors import StudyError, did_you_mean

Side = Literal["Penalties", "Adversarial training", "Combinations", "Noise", "Others", "The plain network"]
SIDES: tuple[Side, ...] = get_args(Side)


class MethodGroup(NamedTuple):
    """Kinds that belong together in sentences and plots. Colors are Okabe and Ito's, which the color-blind can tell apart."""

    title: str
    side: Side
    color: str
    marker: str


EUCLIDEAN = MethodGroup("penalty, Euclidean", "Penalties", "#56b4e9", "o")
DUAL = MethodGroup("penalty, dual norm", "Penalties", "#0072b2", "s")
MOTION = MethodGroup("penalty, coherent motion", "Penalties", "#b07aa1", "h")
WASSERSTEIN = MethodGroup("penalty, Wasserstein", "Penalties", "#d55e00", "D")
OWN = MethodGroup("penalty, own metric", "Penalties", "#8c6d31", "p")
TIKHONOV = MethodGroup("Tikhonov", "Penalties", "#e69f00", "X")
NOISE = MethodGroup("noise", "Noise", "#999999", "v")
ADVERSARIAL = MethodGroup("adversarial training", "Adversarial training", "#009e73", "^")
COMBINED = MethodGroup("penalty and adversarial training", "Combinations", "#cc79a7", "P")
OTHER = MethodGroup("other", "Others", "#000000", "X")  # kinds of a later version
PLAIN = MethodGroup("none", "The plain network", "#000000", "*")
GROUPS = (EUCLIDEAN, DUAL, WASSERSTEIN, MOTION, OWN, TIKHONOV, NOISE, ADVERSARIAL, COMBINED, OTHER, PLAIN)


@dataclass(frozen=True)
class Kind:
    """One kind of regularizer. Exactly one of ``objective``, ``penalty``, ``attack`` and ``around`` builds what is minimized.

    Attributes:
        title, color, group: on pages and in plots.
        objective: from the metric and eta.
        penalty: from the metric, eta and the engine; such a kind can be combined with an attack.
        attack: from the metric, epsilon, and whether the attacked image must stay in [0, 1]. Trains on attacked images.
        around: from a penalty and epsilon; what a penalty is combined with by +, at random points around the images.
        metric: from a pixel graph and a mass; None for a kind without a graph.
        motion: what coherent motion carries; None for a kind without one.
        own: whether the metric is one of the user's own, made by ``factory(height, width)``.
    """

    title: str
    color: str
    group: MethodGroup
    objective: Callable[[Metric, float | Tensor], Objective] | None = None
    penalty: Callable[[Metric, float | Tensor, EngineName], GradientPenalty] | None = None
    attack: Callable[[Metric, float, bool], Attack] | None = None
    around: Callable[[GradientPenalty, float], Objective] | None = None
    metric: Callable[[PixelGraph, float], Metric] | None = None
    motion: Motion | None = None
    own: bool = False


def _transport(graph: PixelGraph, mass: float) -> Metric:
    return Wasserstein(graph, mass=mass)


def _squared(metric: Metric, eta: float | Tensor, engine: EngineName) -> GradientPenalty:
    return GradientPenalty(metric, eta, engine=engine)


def _length(metric: Metric, eta: float | Tensor, engine: EngineName) -> GradientPenalty:
    return GradientPenalty(metric, eta, engine=engine, power=1)


# What each kind minimizes, in formulas, is in docs/study.md.
KINDS = {
    "none": Kind("none", "#63625e", PLAIN, objective=lambda metric, eta: Plain()),
    "euclidean": Kind("Euclidean", "#0069a8", EUCLIDEAN, penalty=_squared),
    "wasserstein": Kind("Wasserstein", "#c24d00", WASSERSTEIN, penalty=_squared, metric=_transport),
    "uniform": Kind(
        *("image-independent", "#e8a33d", WASSERSTEIN),
        penalty=_squared,
        metric=lambda graph, mass: Wasserstein(graph, mass=mass, uniform=True),
    ),
    "deformation": Kind("coherent motion", "#8f5a87", MOTION, penalty=_squared, motion="transport"),
    "advection": Kind("coherent motion of values", "#d4a6c8", MOTION, penalty=_squared, motion="advection"),
    "own": Kind("own metric", "#8c6d31", OWN, penalty=_squared, own=True),
    "dual-norm": Kind(
        *("dual norm", "#17becf", DUAL),
        penalty=lambda metric, eta, engine: GradientPenalty(DualNorm(), eta, engine=engine),
    ),
    "dual-margin": Kind(
        *("dual norm of the margin", "#1b4f72", DUAL),
        penalty=lambda metric, eta, engine: GradientPenalty(DualNorm(), eta, of="margin", engine=engine),
    ),
    "euclidean-length": Kind("Euclidean length", "#7fb3e6", EUCLIDEAN, penalty=_length),
    "wasserstein-length": Kind("Wasserstein length", "#8b0000", WASSERSTEIN, penalty=_length, metric=_transport),
    "dual-length": Kind(
        *("dual length", "#0b6e7a", DUAL),
        penalty=lambda metric, eta, engine: GradientPenalty(DualNorm(), eta, engine=engine, power=1),
    ),
    "tikhonov": Kind("Tikhonov", "#9467bd", TIKHONOV, objective=Tikhonov, metric=_transport),
    "tikhonov-curvature": Kind(
        *("Tikhonov without its Laplacian term", "#5b2a86", TIKHONOV),
        objective=lambda metric, eta: Tikhonov(metric, eta, laplacian=None),
        metric=_transport,
    ),
    "tikhonov-euclidean": Kind("Euclidean Tikhonov", "#c5b0d5", TIKHONOV, objective=Tikhonov),
    "euclidean-noise": Kind("Gaussian noise", "#8c8c8c", NOISE, objective=NoisyInputs),
    "wasserstein-noise": Kind("Wasserstein noise", "#c49c94", NOISE, objective=NoisyInputs, metric=_transport),
    "deformation-noise": Kind("coherent noise", "#6b6ecf", NOISE, objective=NoisyInputs, motion="transport"),
    "advection-noise": Kind("coherent noise of values", "#9c9ede", NOISE, objective=NoisyInputs, motion="advection"),
    "own-noise": Kind("noise of an own metric", "#bd9e39", NOISE, objective=NoisyInputs, own=True),
    "reference-noise": Kind(  # of covariance L(1), the same for every image: what can be certified
        *("Wasserstein noise of the white image", "#7f4f3f", NOISE),
        objective=NoisyInputs,
        metric=lambda graph, mass: Wasserstein(graph, mass=mass, reference="ones"),
    ),
    "adversarial": Kind("FGSM training", "#2ca02c", ADVERSARIAL, attack=lambda metric, epsilon, limited: FGSM(epsilon)),
    "l2-adversarial": Kind(
        *("L2 one-step training", "#98df8a", ADVERSARIAL),
        attack=lambda metric, epsilon, limited: PGD(epsilon, epsilon, 1, norm="l2", random_start=False),
    ),
    "pgd7": Kind(
        *("PGD-7 training", "#006400", ADVERSARIAL),
        attack=lambda metric, epsilon, limited: PGD(epsilon, epsilon / 4, 7),
    ),
    "wasserstein-adversarial": Kind(
        *("Wasserstein one-step training", "#bcbd22", ADVERSARIAL),
        attack=lambda metric, epsilon, limited: WassersteinFGSM(metric, epsilon, limited=limited),
        metric=_transport,
    ),
    "displaced": Kind("random points", "#4b0082", OTHER, around=DisplacedPenalty),
    "linearity": Kind("local linearity", "#708090", OTHER, around=LocalLinearity),
}
COMBINATION_COLOR = "#e377c2"
ON_A_GRAPH = tuple(name for name, kind in KINDS.items() if kind.metric)
IN_MOTION = tuple(name for name, kind in KINDS.items() if kind.motion)
OF_YOUR_OWN = tuple(name for name, kind in KINDS.items() if kind.own)
LARGEST_RADIUS = 10**6  # pixels; every larger one is that of the whole image too
SMOOTHNESS = 2.0  # the default of coherent motion, in pixels
PENALTIES = tuple(name for name, kind in KINDS.items() if kind.penalty)
ATTACKS = tuple(name for name, kind in KINDS.items() if kind.attack)
AROUND = tuple(name for name, kind in KINDS.items() if kind.around)


def title_of(kind: str) -> str:
    """``wasserstein+l2-adversarial`` in words; a kind of a later version as it is written."""
    return " + ".join(KINDS[part].title if part in KINDS else part for part in kind.split("+"))


def heading_of(kind: str) -> str:
    """The title at the head of a column."""
    title = title_of(kind)
    return title[:1].upper() + title[1:]


def color_of(kind: str) -> str:
    return KINDS[kind].color if kind in KINDS else COMBINATION_COLOR if "+" in kind else "#000000"


def group_of(kind: str) -> MethodGroup:
    """The group of a kind, of a combination, or of a kind that only a later version knows."""
    first, _, second = kind.partition("+")
    if second in AROUND:  # a penalty still: no image is attacked
        return group_of(first)
    return KINDS[kind].group if kind in KINDS else COMBINED if "+" in kind else OTHER


def is_penalty(kind: str) -> bool:
    """Whether this kind trains without adversarial examples and without noise."""
    return group_of(kind).side == "Penalties"


@dataclass(frozen=True)
class Regularizer:
    """One point of a study. ``str()`` and :meth:`parse` are inverses: ``wasserstein:eta=0.3,radius=2``, ``pgd7:eta=8/255``.

    A metric of the user's own is named after the kind: ``own:module:factory,eta=0.3``, called as ``factory(height, width)``.
    ``PENALTY+ATTACK`` is a kind too: the penalty of strength eta, taken at images attacked with epsilon. ``PENALTY+displaced``
    and ``PENALTY+linearity`` look at a random point at most epsilon away from each image.
    """

    kind: str
    eta: float = 0.0
    radius: int = 0
    mass: float = 0.0
    epsilon: float = 0.0
    smoothness: float = 0.0
    factory: str = ""

    def __post_init__(self) -> None:
        first, second = self.parts
        alone = [name for name in KINDS if name not in AROUND]
        if self.kind not in alone and not (first in PENALTIES and second in (*ATTACKS, *AROUND)):
            joined = f"or PENALTY+ATTACK of {', '.join(PENALTIES)} and {', '.join((*ATTACKS, *AROUND))}"
            pairs = [f"{penalty}+{other}" for penalty in PENALTIES for other in (*ATTACKS, *AROUND)]
            near = did_you_mean(self.kind, pairs if second else alone)
            got = f"got {self.kind!r}{near and '; ' + near}"
            raise StudyError(f"regularizer must be one of {', '.join(alone)}; {joined}; {got}")
        for name in ("eta", "mass", "epsilon", "smoothness"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise StudyError(f"{name} must be a finite number of at least 0; got {value:g} in {self}")
        on_graph = any(part in ON_A_GRAPH for part in self.parts)
        if on_graph and self.radius < 1:
            got = f"radius={self.radius} in {self}"
            raise StudyError(f"{self.kind} needs a radius of at least 1 pixel; got {got}; write {self.kind}:eta=0.3,radius=2")
        if self.radius > LARGEST_RADIUS:
            raise StudyError(f"radius must be at most {LARGEST_RADIUS}; got {self}; take that of the image's longer side")
        in_motion = any(part in IN_MOTION for part in self.parts)
        if (self.smoothness > 0) != in_motion:
            remedy = f"write {self.kind}:eta=1,smoothness=2" if in_motion else "leave it out"
            raise StudyError(
                f"smoothness must be positive for {', '.join(IN_MOTION)}, and left out for others; got {self}; {remedy}"
            )
        if (self.radius and not on_graph) or (self.mass and not on_graph and not in_motion):
            raise StudyError(
                f"radius and mass belong to {', '.join(ON_A_GRAPH)}, and mass to {', '.join(IN_MOTION)}; got {self}; "
                "leave them out"
            )
        own = any(part in OF_YOUR_OWN for part in self.parts)
        if own != bool(self.factory) or (own and not all(self.factory.partition(":"))):
            remedy = f"write {self.kind}:module:factory,eta=0.3" if own else "leave it out"
            raise StudyError(f"{', '.join(OF_YOUR_OWN)} need a metric of your own, module:factory; got {self}; {remedy}")
        if (self.kind == "none") != (self.eta == 0):
            remedy = "leave its eta out"
            if self.kind != "none":
                kind, _, rest = str(self).partition(":")
                given = [part for part in rest.split(",") if part and part != self.factory]
                remedy = f"write for example {kind}:{','.join([self.factory] * own + ['eta=0.3', *given])}"
            raise StudyError(f"eta must be positive for every regularizer except none; got {self}; {remedy}")
        if bool(second) != (self.epsilon > 0):
            raise StudyError(
                "epsilon, the size of the attack in PENALTY+ATTACK or of the ball in PENALTY+displaced and +linearity, must be "
                f"positive there and left out elsewhere; got {self}; write for example "
                "wasserstein+l2-adversarial:eta=0.3,radius=2,epsilon=0.25"
            )

    @property
    def parts(self) -> tuple[str, str]:
        """The kind, or the penalty and the attack of a combination."""
        first, _, second = self.kind.partition("+")
        return first, second

    @property
    def can_grow(self) -> bool:
        """Whether a ramp may raise eta epoch by epoch; the size of an attack is fixed."""
        return self.parts[0] not in ("none", *ATTACKS)

    @classmethod
    def parse(cls, text: str) -> Regularizer:
        """Read ``kind`` or ``kind:eta=...,radius=...``, with fields of this class; a number may be a ratio, ``8/255``.

        Without a radius, a graph has the default one, and motion without a smoothness likewise.
        """
        kind, _, rest = text.partition(":")
        factory = ""
        if any(part in OF_YOUR_OWN for part in kind.split("+")):
            factory, _, rest = rest.partition(",")
        readers: dict[str, Callable[[str], float]] = {
            field.name: int if field.name == "radius" else _number for field in dataclasses.fields(cls)[1:-1]
        }
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            name, _, number = part.partition("=")
            if name not in readers or name in values:
                raise StudyError(
                    "a regularizer is KIND:eta=NUMBER,radius=PIXELS,mass=NUMBER,epsilon=NUMBER,smoothness=PIXELS, each once; "
                    f"got {text!r}"
                )
            try:
                values[name] = readers[name](number)
            except ValueError:
                expected = "a whole number" if name == "radius" else "a number, such as 0.3 or 8/255"
                raise StudyError(f"{name} must be {expected}; got {number!r} in {text!r}") from None
        if any(part in ON_A_GRAPH for part in kind.split("+")):
            values.setdefault("radius", RADIUS)
        if any(part in IN_MOTION for part in kind.split("+")):
            values.setdefault("smoothness", SMOOTHNESS)
        return cls(kind, **values, factory=factory)  # type: ignore[arg-type]

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:-1]}
        parts = [self.factory] * bool(self.factory) + [f"{name}={_written(value)}" for name, value in values.items() if value]
        return f"{self.kind}:{','.join(parts)}" if parts else self.kind

    @property
    def slug(self) -> str:
        """The name as a part of a folder's name: ``wasserstein-eta0.3-radius2``, ``pgd7-eta8_255``."""
        return str(self).replace(":", "-").replace(",", "-").replace("=", "").replace("/", "_")

    def metric(self, height: int, width: int) -> Metric:
        """The metric of the penalty or noise; Euclidean for a kind without a graph or motion."""
        return self._metric(self.parts[0], (height, width))

    def objective(
        self, size: tuple[int, int], engine: EngineName, eta: float | Tensor | None = None, loss: Loss | None = None
    ) -> Objective:
        """What is minimized.

        Arguments:
            size: height and width of the images.
            engine: how a gradient penalty is differentiated.
            eta: replaces the strength of a penalty or noise, for example by a tensor that a ramp fills epoch by epoch.
            loss: replaces cross-entropy.
        """
        try:
            made = self._objective(size, engine, eta)
            return made if loss is None else _with_loss(made, loss)
        except ValueError as error:  # such as a motion that is smoother than the image
            raise StudyError(f"{self}: {error}") from None

    def _objective(self, size: tuple[int, int], engine: EngineName, eta: float | Tensor | None) -> Objective:
        name, attacked = self.parts
        kind, metric, strength = KINDS[name], self._metric(name, size), self.eta if eta is None else eta
        if kind.objective:
            return kind.objective(metric, strength)
        if not kind.penalty:
            return AdversarialTraining(self._attack(name, self.eta, size))
        penalty = kind.penalty(metric, strength, engine)
        if attacked and (around := KINDS[attacked].around):
            return around(penalty, self.epsilon)
        return AdversarialTraining(self._attack(attacked, self.epsilon, size), penalty=penalty) if attacked else penalty

    def _metric(self, name: str, size: tuple[int, int]) -> Metric:
        kind = KINDS[name]
        if kind.own:
            return self._own_metric(*size)
        if kind.motion:
            return Deformations(*size, self.smoothness, kind.motion, self.mass)
        return kind.metric(PixelGraph.grid(*size, self.radius), self.mass) if kind.metric else Euclidean()

    def _own_metric(self, height: int, width: int) -> Metric:
        metric: Metric = own_code.made(self.factory, "metric", "factory(height, width)", height, width)
        if not callable(getattr(metric, "cometric", None)):
            raise StudyError(
                f"metric {self.factory}: the factory returned {type(metric).__name__}; expected a metric, with cometric(x); "
                "return one"
            )
        return metric

    def _attack(self, name: str, epsilon: float, size: tuple[int, int]) -> Attack:
        build = KINDS[name].attack
        assert build is not None
        # The closed form of a kind that is only an attack may leave [0, 1].
        return build(self._metric(name, size), epsilon, bool(self.parts[1]))


def _with_loss(objective: Objective, loss: Loss) -> Objective:
    """The same objective with another loss, its own and that of its penalty."""
    changes: dict[str, Any] = {"loss": loss} if hasattr(objective, "loss") else {}
    if isinstance(penalty := getattr(objective, "penalty", None), GradientPenalty):
        changes["penalty"] = dataclasses.replace(penalty, loss=loss)
    return dataclasses.replace(objective, **changes)  # type: ignore[type-var]


def strength_label(value: float) -> str:
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
