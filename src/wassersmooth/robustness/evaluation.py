"""evaluate(): how robust any classifier is, in which units, and whether the numbers can be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _loaders, _model_checks
from wassersmooth.model_state import call_model
from wassersmooth.normalized import find_units
from wassersmooth.robustness import suites
from wassersmooth.robustness.attack_base import Attack
from wassersmooth.robustness.autoattack import AutoAttack
from wassersmooth.robustness.determinism import RANDOM, check_determinism
from wassersmooth.robustness.findings import Finding
from wassersmooth.robustness.intervals import bootstrap, wilson
from wassersmooth.robustness.masking import MaskingChecks
from wassersmooth.robustness.measurement import Measurement, Perturbation
from wassersmooth.robustness.model_queries import isolated_model
from wassersmooth.robustness.report import Entry, Flips, Report
from wassersmooth.robustness.suites import AUTOATTACK_IMAGES, CLEAN, CUSTOM, Suite, Variation, perturbations
from wassersmooth.robustness.summary import Ball, CurvePoint, error_curve, headline
from wassersmooth.robustness.translations import AXES, Axis, label_changes

Progress = Callable[[int, int, str], None]  # (measures done, measures in all, name of the next one)

# Results by image, under names that say what was measured. With a store on disk, an interrupted evaluate() can continue.
Memory = MutableMapping[str, Tensor]

AS_THEY_ARE = Variation("the images as they are", lambda images, generator: images)
LONGEST_REACH = 16  # the paper states none; with this one its plain network's flips are met
SHORTER_REACHES = (2, 4, 6, 8, 10, 12, 14)


def evaluate(
    model: nn.Module,
    images: Tensor | Iterable[Sequence[Tensor]],
    labels: Tensor | None = None,
    suite: Suite = "standard",
    progress: Progress | None = None,
    generator: torch.Generator | None = None,
    *,
    max_images: int | None = None,
    keep_images: bool = False,
    autoattack_images: int = AUTOATTACK_IMAGES,
    memory: Memory | None = None,
    seed: int | None = None,
) -> Report:
    """How robust a classifier is, in which units, and whether the numbers can be trusted.

    The model is measured in eval mode and restored afterwards, even after an exception. The batch size is found
    automatically. Clean error, label flips along translations and the checks for gradient masking are part of every suite.

    Arguments:
        model: any classifier that takes images in [0, 1] and returns scores (B, K), or an object with such ``logits``. With its
            normalization inside (:class:`wassersmooth.Normalized`, of one std), attacks are run in normalized units too.
        images, labels: what to measure on, where the model is. # shape: (B, C, H, W) and (B,)
            Or only a loader: an iterable of batches ``(images, labels)``. Its images stay on the CPU and are
            moved to the model batch by batch.
        suite: ``"quick"`` (under a minute on a CPU for a small model; at most 200 images), ``"paper"`` (the paper's two
            tables), ``"standard"`` (the paper's with margin-loss, L2 and Wasserstein attacks, noise, deformations) or
            ``"full"`` (the standard one with AutoAttack and common corruptions). Or your own suite: a
            sequence of attacks, which are named by their repr, or a mapping of names to attacks or any other callables
            ``(model, images, labels, generator) -> images``. If attacks in a sequence, or in units of shift, differ only in
            epsilon and step, an image gets the next larger one only if it withstood the last, so ``report.curve`` is cheap.
        progress: called as ``progress(done, total, name)`` before each measure and once at the end. Between the batches of a
            long measure it is called again, with the same counts and ``"name, 384 of 2000 images"``.
        generator: the source of the seed of everything random; without one, the global random state, which is restored.
        max_images: how many images, from the first on, to measure on; needed if those of a loader do not fit into memory.
        keep_images: whether the report keeps the perturbed images of every measure.
        autoattack_images: the maximum number of images for AutoAttack, which is slow.
        memory: a store of results: those found in it are not measured again, and new ones are added as they come. It must
            belong to this model, these images and their labels. A result is found by name and repr, for a function by its name.
        seed: instead of a generator; ``seed=report.seed`` repeats a report if all other arguments are the same.
    """
    suites.check(suite)
    _model_checks.module(model)
    if max_images is not None:
        max_images = _checks.positive_integer("max_images", max_images, "leave it out for all images")
    if progress is not None:
        _checks.function("progress", progress, "of (done, total, name), such as print", 3)
    if memory is not None and not isinstance(memory, MutableMapping):
        raise ValueError(f"memory must be a mutable mapping of names to tensors; got {_checks.kind_of(memory)}; a dict is one")
    _checks.choice("keep_images", keep_images, (False, True))
    if keep_images and memory is not None:
        raise ValueError("keep_images=True needs every measure to be run; got a memory too, which skips some; leave one out")
    autoattack_images = _checks.positive_integer("autoattack_images", autoattack_images)
    _checks.generator(generator)
    seed = _checked_seed(seed, generator)
    images, labels, device = _gathered(model, images, labels, max_images)
    with isolated_model(model, torch.empty(0, device=device)) as inner:
        inner.eval()
        classes = _ask_once(inner, images[:1].to(device))
        if seed is None:
            drawn_on = "cpu" if generator is None else generator.device
            seed = int(torch.randint(0, 2**31, (), device=drawn_on, generator=generator))
        measurement = Measurement(inner, images, labels, seed, device)
        found = {} if memory is None else memory
        return _Evaluation(measurement, classes, suite, progress, autoattack_images, keep_images, found).run()


def _gathered(model: nn.Module, images: object, labels: object, max_images: int | None) -> tuple[Tensor, Tensor, torch.device]:
    """Images and labels, checked, and the device to measure them on."""
    if isinstance(images, Tensor):
        if labels is None:
            raise ValueError("labels must be given with a tensor of images, one class index per image; got None")
        _checks.batch("images", images)
        _model_checks.class_labels(labels, images)
        assert isinstance(labels, Tensor)
        _model_checks.same_device(model, images)
        _checks.float64_on(images.device, "evaluate")
        _checks.pixels("images", images)
        return images[:max_images], labels[:max_images], images.device
    if isinstance(images, Iterable) and labels is not None and not hasattr(images, "__array__"):
        if isinstance(labels, str):
            raise ValueError(f"labels come third, and a loader has its own; got {labels!r}; write suite={labels!r}")
        raise ValueError(
            f"a loader has its own labels; got a {type(images).__name__} of batches, and labels too; leave the labels out, or "
            "pass a tensor (B, C, H, W)"
        )
    if hasattr(images, "__array__"):
        _checks.batch("images", images)  # refuses a NumPy array with the remedy
    _checks.float64_on(_loaders.device_of(model), "evaluate")
    return *_loaders.gather(images, max_images), _loaders.device_of(model)


def _ask_once(model: nn.Module, images: Tensor) -> int | None:
    """Try one image before hours of work, and explain torch's error; return the number of outputs."""
    with torch.no_grad():
        try:
            outputs: object = call_model(model, images)
            return outputs.shape[1] if isinstance(outputs, Tensor) and outputs.dim() == 2 else None  # refused later
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError) as error:
            raise _model_checks.unfit(images, error) from error


class _Evaluation:
    def __init__(
        self,
        measurement: Measurement,
        classes: int | None,
        suite: Suite,
        progress: Progress | None,
        autoattack_images: int,
        keep_images: bool,
        memory: Memory,
    ) -> None:
        self.measurement, self.model, self.classes = measurement, measurement.model, classes
        self.suite, self.seed, self.limits = suite, measurement.seed, suites.limits(suite)
        self.autoattack_images, self.keep_images, self.memory = autoattack_images, keep_images, memory
        self.progress = progress or (lambda done, total, name: None)
        self.kept: dict[str, Tensor] = {}
        self.seconds: dict[str, float] = {}

    def run(self) -> Report:
        findings = check_determinism(self.measurement, self.limits.probes)
        units = find_units(self.model)
        normalization = units[0] if len(units) == 1 else None  # the units of an ensemble may differ
        size = (self.measurement.images.shape[-2], self.measurement.images.shape[-1])
        random = any(finding.name == RANDOM for finding in findings)
        # With a std of 1, normalized units are pixel units.
        about = (size, normalization is not None and bool((normalization.std != 1).any()), random)
        plan = {CLEAN: AS_THEY_ARE} | perturbations(self.suite, *about)
        curves_of_all = isinstance(self.suite, Sequence) and not isinstance(self.suite, str)
        smaller = _smaller({name: attack for name, attack in plan.items() if curves_of_all or suites.is_shift(attack)})
        axes = [axis for axis, pixels in zip(AXES, reversed(size), strict=True) if pixels > 1]  # one pixel cannot move
        total = len(plan) + len(axes) + 1

        table: dict[str, Tensor] = {}
        for done, name in enumerate(sorted(plan, key=lambda name: len(smaller.get(name, ())))):
            self._announce(done, total, name)
            table[name] = self._wrong(name, plan[name], {before: table[before] for before in smaller.get(name, ())})
        table = {name: table[name] for name in plan}
        entries = [_entry(name, table[name], suites.description_of(plan[name]), *suites.ball_of(plan[name])) for name in plan]
        translations: list[list[Flips]] = []
        for done, axis in enumerate(axes, len(plan)):
            self._announce(done, total, f"flips_{axis}")
            translations.append(self._flips(axis))
        self._announce(total - 1, total, "masking")
        known = table
        if not isinstance(self.suite, str):  # the checks know attacks by name, and a name may mean another attack here
            full = perturbations("full", *about)
            known = {name: wrong for name, wrong in table.items() if repr(plan[name]) == repr(full.get(name))}
        checks = MaskingChecks(self.measurement, known, self.limits)
        began = time.perf_counter()
        findings = findings + checks.run()
        balls = {e.name: Ball(e.epsilon, e.units, e.norm) for e in entries if e.epsilon is not None and not _aims(plan[e.name])}
        curve = error_curve(table[CLEAN], table, balls)
        if not findings:  # masked gradients make attacks weak, too
            findings = self._too_weak(checks, curve, table, {name: balls[name] for name in balls if _is_ours(plan[name])})
        self.seconds["masking"] = time.perf_counter() - began
        self.progress(total, total, "done")
        probes = tuple(_entry(name, wrong, checks.descriptions[name]) for name, wrong in checks.probes.items())
        std = None if normalization is None else tuple(normalization.std.flatten().tolist())
        longest, shorter = (tuple(part) for part in ([f[-1] for f in translations], [g for f in translations for g in f[:-1]]))
        suite = self.suite if isinstance(self.suite, str) else CUSTOM
        return Report(
            *(suite, self.seed, tuple(entries), probes, longest, findings, std, shorter),
            curve=curve,
            classes=self.classes,
            fooled={name: self._as_given(wrong) for name, wrong in table.items()},
            seen={name: self._as_given(torch.ones_like(wrong)) for name, wrong in table.items()},
            images={name: kept[self.measurement.order[: len(kept)].argsort()] for name, kept in self.kept.items()},
            seconds=self.seconds,
        )

    @staticmethod
    def _too_weak(
        checks: MaskingChecks, curve: Sequence[CurvePoint], table: Mapping[str, Tensor], balls: Mapping[str, Ball]
    ) -> list[Finding]:
        """Whether the error that the summary names first is too low for attacks of that size. Balls: of attacks of ours."""
        points = headline(curve)
        if not points or points[0].units != "pixel":
            return []
        first = points[0]
        sizes = {name: ball.epsilon for name, ball in balls.items() if ball.family == (first.norm, first.units)}
        if first.epsilon not in sizes.values():
            return []
        seen = [table[CLEAN], *(table[name] for name, epsilon in sizes.items() if epsilon <= first.epsilon)]
        wrong = torch.stack([part[: min(map(len, seen))] for part in seen]).any(0)
        return checks.attacks_too_weak(first.epsilon, "l2" if first.norm == "l2" else "linf", wrong)

    def _as_given(self, values: Tensor) -> Tensor:
        """Values of the first images, in the order in which the images were given; False for the others. # shape: (B,) bool"""
        found = torch.zeros(len(self.measurement.order), dtype=torch.bool, device="cpu")
        found[self.measurement.order[: len(values)]] = values
        return found

    def _announce(self, done: int, total: int, name: str) -> None:
        """Report progress, now and between batches, so that a long measure does not look stuck."""
        progress = self.progress  # not through self: a reference cycle would keep all images alive
        progress(done, total, name)
        self.measurement.between_batches = lambda seen, images: progress(done, total, f"{name}, {seen} of {images} images")

    def _wrong(self, name: str, perturb: Perturbation, fallen: Mapping[str, Tensor]) -> Tensor:
        """Which images are wrong. Those that fell to a smaller epsilon are wrong already, and not attacked again."""
        limit = min(self.limits.images or len(self.measurement.images), len(self.measurement.images))
        if isinstance(perturb, AutoAttack):
            limit = min(limit, self.autoattack_images)
        safe = perturb if isinstance(perturb, Attack | Variation) else _guarded(name, perturb)
        standing = torch.zeros(len(self.measurement.images), dtype=torch.bool, device="cpu")
        standing[:limit] = True
        for wrong in fallen.values():
            standing[:limit] &= ~wrong[:limit]

        def measure() -> Tensor:
            began = time.perf_counter()
            wrong = ~standing[:limit]
            found, kept = torch.zeros(0, dtype=torch.bool, device="cpu"), None
            if standing.any():
                found, kept = self.measurement.perturbed(name, safe, standing, self.keep_images)
            wrong[standing[:limit]] = found
            if self.keep_images:
                self.kept[name] = self._with_fallen(kept, standing[:limit], fallen)
            self.seconds[name] = time.perf_counter() - began  # results are on the CPU by now
            return wrong

        after = f" after {', '.join(fallen)}" if fallen else ""
        return self._remembered(f"{name} {suites.description_of(perturb)}{after}", limit, measure)

    def _with_fallen(self, kept: Tensor | None, standing: Tensor, fallen: Mapping[str, Tensor]) -> Tensor:
        """The perturbed images; of an image that fell earlier, the one that it fell to. # shape: (limit, C, H, W)"""
        images = self.measurement.images[: len(standing)].cpu().clone()
        for name, wrong in reversed(list(fallen.items())):  # the smallest last, which an image fell to first
            images[wrong[: len(standing)]] = self.kept[name][: len(standing)][wrong[: len(standing)]]
        if kept is not None:
            images[standing] = kept
        return images

    def _flips(self, axis: Axis) -> list[Flips]:
        """The flips within each reach, the longest last."""
        height, width = self.measurement.images.shape[-2:]
        reach = min(LONGEST_REACH, (width if axis == "horizontal" else height) // 2)

        def ask(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            return label_changes(self.model, images, axis, reach)

        def measure() -> Tensor:
            began = time.perf_counter()
            changes = self.measurement.collect(f"flips_{axis}", ask, self.limits.flips)
            self.seconds[f"flips_{axis}"] = time.perf_counter() - began
            return changes

        changes = self._remembered(f"flips_{axis} reach {reach}", self.limits.flips, measure)
        return [self._within(axis, changes, r) for r in (*(r for r in SHORTER_REACHES if r < reach), reach)]

    def _within(self, axis: str, changes: Tensor, reach: int) -> Flips:
        middle = changes.shape[1] // 2
        flips = changes[:, middle - reach : middle + reach].sum(1).double()
        resampling = torch.Generator().manual_seed(self.measurement.seed_of(f"bootstrap {axis}"))
        low, high = bootstrap(flips, resampling)
        return Flips(axis, flips.mean().item(), low, high, len(flips), reach)

    def _remembered(self, what: str, limit: int, measure: Callable[[], Tensor]) -> Tensor:
        """A result from memory, or measured now; its name holds all that determines it but the model and the images."""
        name = f"{what}, seed {self.seed}, {min(limit, len(self.measurement.images))} of {len(self.measurement.images)} images"
        if name not in self.memory:
            self.memory[name] = measure()
        return self.memory[name]


def _smaller(plan: Mapping[str, Perturbation]) -> dict[str, list[str]]:
    """For each attack that has a smaller twin, the names of what each image is given before it: as it is, smaller epsilons."""
    twins: dict[tuple[object, ...], list[tuple[float, str]]] = {}
    for name, attack in plan.items():
        if isinstance(attack, Attack) and not attack.targeted and hasattr(attack, "epsilon"):
            others = [f.name for f in fields(attack) if f.name not in ("epsilon", "step")]
            settings = [(other, suites.as_told_apart(getattr(attack, other))) for other in others]
            twins.setdefault((type(attack), *settings), []).append((attack.epsilon, name))
    found: dict[str, list[str]] = {}
    for group in twins.values():
        names = [name for _, name in sorted(group)]
        found |= {name: [CLEAN, *names[:place]] for place, name in enumerate(names) if len(names) > 1}
    return found


def _aims(perturb: Perturbation) -> bool:
    """Whether an attack is targeted: it then lowers the error instead of raising it."""
    return isinstance(perturb, Attack) and perturb.targeted


def _is_ours(perturb: Perturbation) -> bool:
    """Whether it is an attack of this library; one that is derived from it may stay in a part of its ball."""
    return type(perturb).__module__.startswith("wassersmooth.")


def _guarded(name: str, perturb: Perturbation) -> Perturbation:
    """Wrap a user's callable, which may write into the images, change the model's mode, or return anything."""

    def call(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        found = perturb(model, images.clone(), labels.clone(), generator)
        model.eval()
        expected = (images.shape, images.dtype, images.device)
        if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != expected:
            got = (
                f"{tuple(found.shape)} of {found.dtype} on {found.device}"
                if isinstance(found, Tensor)
                else type(found).__name__
            )
            raise ValueError(
                f"the suite's {name!r} must return images like those it receives, {tuple(images.shape)} of {images.dtype} on "
                f"{images.device}; got {got}; return one perturbed image for each"
            )
        return found

    return call


def _checked_seed(seed: object, generator: object) -> int | None:
    checked = _checks.seed(seed, "report.seed is one")
    if checked is not None and generator is not None:
        raise ValueError(f"the seed must come from one place; got seed={seed} and a generator; leave one of them out")
    return checked


def _entry(name: str, wrong: Tensor, description: str, epsilon: float | None = None, units: str = "", norm: str = "") -> Entry:
    low, high = wilson(int(wrong.sum()), len(wrong))
    return Entry(name, 100 * wrong.double().mean().item(), low, high, len(wrong), description, epsilon, units, norm)
