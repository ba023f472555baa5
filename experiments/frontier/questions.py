"""The questions that a frontier answers. Each picks the points that answer it and puts the result into sentences.

Families are compared at equal clean error. Variants of the whole harness (activation, epochs, augmentation), and the Laplacian
term, which leaves the meaning of eta as it is, are compared at equal strength as well, since they change clean error too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.comparison import Difference, EqualClean, all_clear, at_equal_clean, at_equal_strength
from experiments.frontier.learning_curves import BY_LUCK, learning_curve_sentence, learning_curves_of
from experiments.frontier.points import MORE_CLEAN, base_variant, compared_threats
from experiments.points import THREATS, Point, Variant, families
from experiments.row_store import Row
from experiments.uncertainty import UNSEEDED, Uncertainty
from wassersmooth.study import regularizers
from wassersmooth.study.regularizers import KINDS, ON_A_GRAPH, SIDES, group_of
from wassersmooth.study.tables import counted, listed

SAME_GEOMETRY = {"adversarial": "dual-norm", "l2-adversarial": "euclidean", "wasserstein-adversarial": "wasserstein"}


@dataclass(frozen=True)
class Curve:
    """A line of the question's plot.

    Attributes:
        pair: curves of the same number belong together, and share a color; None is a separate color.
    """

    title: str
    points: tuple[Point, ...]
    pair: int | None = None


@dataclass(frozen=True)
class Answer:
    """A question, its answer in sentences, and the curves to plot. Without curves, rows are still missing.

    Attributes:
        learning_curves: runs whose validation error from epoch to epoch is shown as well.
    """

    name: str
    question: str
    sentences: tuple[str, ...]
    curves: tuple[Curve, ...]
    learning_curves: tuple[Row, ...] = ()


def title_of(family: str) -> str:
    """``wasserstein:radius=2,mass=0.25`` in words."""
    kind, _, rest = family.partition(":")
    return ", ".join([regularizers.title_of(kind), *(part.replace("=", " ") for part in rest.split(",") if part)])


def place_of(family: str) -> tuple[int, str]:
    """The sort key of a family: by its kind, combinations last."""
    order, kind = list(KINDS), family.partition(":")[0]
    return order.index(kind) if kind in order else len(order), family


@dataclass(frozen=True)
class Study:
    """All points, and how uncertain they are."""

    points: Sequence[Point]
    uncertainty: Uncertainty

    @property
    def base(self) -> Variant:
        return base_variant(self.points)

    @property
    def families(self) -> dict[str, list[Point]]:
        """Those of the base variant."""
        return families(self.of(self.base))

    @property
    def variants(self) -> list[Variant]:
        return sorted({point.variant for point in self.points}, key=lambda variant: variant.order)

    def of(self, variant: Variant) -> list[Point]:
        return [point for point in self.points if point.variant == variant]


def answers(points: Sequence[Point]) -> list[Answer]:
    """All questions, in the order of the page."""
    study = Study(points, Uncertainty.of(points))
    return [ask(study) for ask in QUESTIONS]


def image_dependence(study: Study) -> Answer:
    families = study.families
    pairs = [(family.replace("uniform", "wasserstein"), family) for family in families if family.split(":")[0] == "uniform"]
    named = [(f"With {_rest(second)}, the dependence on the image", first, second) for first, second in pairs]
    missing = "it takes rows of `uniform` and of `wasserstein` with the same radius and mass"
    return _of_families("image", "Does the dependence of L on the image matter?", named, study, missing)


def mass_term(study: Study) -> Answer:
    named = []
    for family in study.families:
        kind, radius, mass = _parsed(family)
        if kind == "wasserstein" and mass:
            named.append((f"A mass term of {mass:g} at radius {radius}", family, f"wasserstein:radius={radius}"))
    missing = "it takes rows of `wasserstein` with and without a mass, at the same radius"
    return _of_families("mass", "What does the mass term buy?", named, study, missing)


def radius(study: Study) -> Answer:
    radii = sorted({r for kind, r, mass in map(_parsed, study.families) if kind == "wasserstein" and not mass})
    named = [
        (f"Radius {r} in place of {radii[0]}", f"wasserstein:radius={r}", f"wasserstein:radius={radii[0]}") for r in radii[1:]
    ]
    missing = "it takes rows of `wasserstein` without a mass at two radii"
    return _of_families("radius", "Which radius?", named, study, missing)


def laplacian_term(study: Study) -> Answer:
    named = []
    for family in study.families:
        kind, _, rest = family.partition(":")
        if kind == "tikhonov":
            named.append((f"With {_rest(family)}, the Laplacian term", family, f"tikhonov-curvature:{rest}"))
    missing = "it takes rows of `tikhonov` and of `tikhonov-curvature` with the same radius and mass"
    answer = _of_families("laplacian", "Does the Laplacian term help?", named, study, missing)
    # Neither has a clean error of the other where the term makes training unsteady; eta means the same in both.
    base = {p.regularizer: p for p in study.of(study.base)}
    sentences = []
    for subject, first, _ in named:
        members = [p for p in base.values() if p.family == first]
        without = [base.get(p.regularizer.replace("tikhonov", "tikhonov-curvature", 1)) for p in members]
        if pairs := [(p, other) for p, other in zip(members, without, strict=True) if other is not None]:
            sentences.append(_equal_strength_sentence(subject, pairs, study.uncertainty))
    return dataclasses.replace(answer, sentences=(*sentences, *answer.sentences))


def penalty_or_step(study: Study) -> Answer:
    """To first order, the step in a ball raises the loss by the dual norm of the gradient, which the penalty makes small."""
    named = []
    for family in study.families:
        kind, _, rest = family.partition(":")
        if kind in SAME_GEOMETRY:
            penalty = ":".join([SAME_GEOMETRY[kind], *([rest] if rest else [])])
            name = title_of(family)
            named.append((f"{name[0].upper()}{name[1:]} in place of the penalty ({title_of(penalty)})", family, penalty))
    missing = "it takes rows of `l2-adversarial` and `euclidean`, say"
    question = "A penalty, or one adversarial step in the same geometry?"
    answer = _of_families("step", question, named, study, missing)
    paired = (dataclasses.replace(curve, pair=number // 2) for number, curve in enumerate(answer.curves))
    return dataclasses.replace(answer, curves=tuple(paired))


def activation(study: Study) -> Answer:
    base = study.base
    others = [v for v in study.variants if v.activation != base.activation and v == base._replace(activation=v.activation)]
    named = [(f"{v.activation} in place of {base.activation}", v, base) for v in others]
    missing = f"it takes rows with another activation than {base.activation}, such as --activation relu"
    return _of_variants("activation", "Softplus or relu?", named, study, missing)


def early_stopping(study: Study) -> Answer:
    """More epochs than the base has, and the same with the best epoch kept: that is compared with the last one."""
    base, known = study.base, study.variants
    named = []
    for v in known:
        whole = v._replace(patience=None, patience_on=base.patience_on)
        if v == base or v != base._replace(epochs=v.epochs, patience=v.patience, patience_on=v.patience_on):
            continue
        if v.patience is None:
            named.append((f"Training for {v.epochs} epochs in place of {base.epochs}", v, base))
        elif whole in known:
            named.append((f"Over {v.epochs} epochs, {_kept(v)} in place of the last", v, whole))
    missing = f"it takes rows with more than {base.epochs} epochs, with and without --patience"
    question = "Does stopping early prevent the overfitting of robustness?"
    answer = _of_variants("epochs", question, named, study, missing)
    seen = tuple(learning_curves_of(study.points, {variant for _, variant, _ in named}))
    added = [*map(learning_curve_sentence, seen), *([BY_LUCK] if seen else [])]
    return dataclasses.replace(answer, sentences=(*answer.sentences, *added), learning_curves=seen)


def augmentation(study: Study) -> Answer:
    base = study.base
    others = [v for v in study.variants if v.augment != base.augment and v == base._replace(augment=v.augment)]
    named = [("Augmentation by crops and flips" if v.augment else "No augmentation", v, base) for v in others]
    missing = "it takes rows with --augment True"
    return _of_variants("augmentation", "With crops and flips, what changes?", named, study, missing)


QUESTIONS: tuple[Callable[[Study], Answer], ...] = (
    *(image_dependence, mass_term, radius, laplacian_term, penalty_or_step),
    *(activation, early_stopping, augmentation),
)


def _of_families(name: str, question: str, named: Sequence[tuple[str, str, str]], study: Study, missing: str) -> Answer:
    """Pairs of families (subject, first, second), in the base variant."""
    members = study.families
    found = [(subject, first, second) for subject, first, second in named if members.get(first) and members.get(second)]
    if not found:
        return Answer(name, question, (f"Not answered yet: {missing}.",), ())
    sentences = [_equal_clean_sentence(subject, [(members[a], members[b])], study.uncertainty) for subject, a, b in found]
    shown = dict.fromkeys(family for _, first, second in found for family in (second, first))
    return Answer(name, question, tuple(sentences), tuple(Curve(title_of(family), tuple(members[family])) for family in shown))


def _of_variants(name: str, question: str, named: Sequence[tuple[str, Variant, Variant]], study: Study, missing: str) -> Answer:
    """Variants, each against another one: at equal strength, then at equal clean error family by family."""
    sentences: list[str] = []
    curves: list[Curve] = []
    compared: set[str] = set()
    for subject, variant, reference in named:
        others = study.of(variant)
        base = {p.regularizer: p for p in study.of(reference)}
        pairs = [(p, base[p.regularizer]) for p in others if p.regularizer in base]
        if not pairs:
            continue
        found = {group_of(p.kind).side for p, _ in pairs}  # what helps one may hurt another
        for side in filter(found.__contains__, SIDES):
            titled = f"{side}: {subject[0].lower()}{subject[1:]}" if len(found) > 1 else subject
            here = [(p, other) for p, other in pairs if group_of(p.kind).side == side]
            sentences.append(_equal_strength_sentence(titled, here, study.uncertainty))
            both = [
                ([p for p in others if p.family == family], [p for p in base.values() if p.family == family])
                for family in dict.fromkeys(p.family for p in others if p.kind != "none" and group_of(p.kind).side == side)
            ]
            if both:
                sentences.append(_equal_clean_sentence(titled, both, study.uncertainty, at_first=True))
        curves.append(Curve(str(variant), tuple(p for p, _ in pairs)))
        compared |= {p.regularizer for p, _ in pairs}
    if not curves:
        return Answer(name, question, (f"Not answered yet: {missing}.",), ())
    known = Curve(str(study.base), tuple(p for p in study.of(study.base) if p.regularizer in compared))
    return Answer(name, question, tuple(sentences), (known, *curves))


def _equal_clean_sentence(
    subject: str, sides: Sequence[tuple[Sequence[Point], Sequence[Point]]], uncertainty: Uncertainty, at_first: bool = False
) -> str:
    """Pairs of fronts, averaged where there are several."""
    found: dict[str, Difference] = {}
    cleans: list[float] = []
    for threat in compared_threats(p for pair in sides for side in pair for p in side):
        met = [meeting for a, b in sides if (meeting := at_equal_clean(a, b, threat, uncertainty, at_first)) is not None]
        if met:
            average = EqualClean.average(met)
            found[threat] = average.difference
            cleans += [average.low, average.high]
    if not found:
        return f"{subject}: no clean error that both sides reach within these rows."
    everyone = [p for pair in sides for side in pair for p in side]
    where = f"{min(cleans):.1f} to {max(cleans):.1f} %; {_seeds(everyone)}"
    return f"{subject} {_verdict(found, uncertainty)}: at equal clean error ({where}) {_figures(found)}."


def _equal_strength_sentence(subject: str, pairs: Sequence[tuple[Point, Point]], uncertainty: Uncertainty) -> str:
    everyone = [point for pair in pairs for point in pair]
    measures = ["clean", *compared_threats(everyone)]
    found = {m: gap for m in measures if (gap := at_equal_strength(pairs, m, uncertainty)) is not None}
    where = f"{counted(len(pairs), 'regularizer')}; {_seeds(everyone)}"
    far = "clean" in found and abs(found["clean"].mean) > MORE_CLEAN
    verdict = (
        f"moves clean error by {found['clean'].mean:+.1f}, too far to compare the rest" if far else _verdict(found, uncertainty)
    )
    return f"{subject} {verdict}: at equal strength ({where}) {_figures(found)}."


def _kept(variant: Variant) -> str:
    when = "the best epoch" if (variant.patience or 0) >= variant.epochs else f"stopping with patience {variant.patience}"
    return f"{when} by {variant.patience_on} validation error"


def _verdict(found: dict[str, Difference], uncertainty: Uncertainty) -> str:
    clear = all_clear({name: gap for name, gap in found.items() if name not in UNSEEDED & uncertainty.from_images})
    better = [_label(name) for name in found if name in clear and clear[name].mean < 0]
    worse = [_label(name) for name in found if name in clear and clear[name].mean > 0]
    parts = [f"improves {listed(better)}"] * bool(better) + [f"worsens {listed(worse)}"] * bool(worse)
    return " and ".join(parts) or "shows no difference beyond chance"


def _figures(found: dict[str, Difference]) -> str:
    return listed([f"{_label(name)} {gap.mean:+.1f} ± {gap.error:.1f}" for name, gap in found.items()])


def _label(measure: str) -> str:
    return THREATS.get(measure, measure)


def _seeds(points: Sequence[Point]) -> str:
    counts = sorted({point.seeds for point in points})
    return counted(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"


def _parsed(family: str) -> tuple[str, int, float]:
    kind, _, rest = family.partition(":")
    if kind not in ON_A_GRAPH:  # kinds of a later version may have any settings
        return kind, 0, 0.0
    known = dict(part.split("=") for part in rest.split(",") if part)
    return kind, int(known.get("radius", 0)), float(known.get("mass", 0))


def _rest(family: str) -> str:
    return family.partition(":")[2].replace("=", " ").replace(",", " and ")
