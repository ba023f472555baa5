"""evaluate(): how robust any classifier is, in which units, and whether the numbers can be trusted."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from numbers import Integral

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth.model_state import answer
from wassersmooth.normalized import find_units
from wassersmooth.robustness import autoattack
from wassersmooth.robustness.asked_again import RANDOM, asked_again
from wassersmooth.robustness.classifier import attacked
from wassersmooth.robustness.intervals import bootstrap, wilson
from wassersmooth.robustness.masking import MaskingChecks
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.report import Entry, Flips, Report
from wassersmooth.robustness.suites import AUTOATTACK_IMAGES, LIMITS, SUITES, WITH_AUTOATTACK, Limits, Row, Suite, rows
from wassersmooth.robustness.translations import AXES, Axis, label_changes

Progress = Callable[[int, int, str], None]  # (measures done, measures in all, name of the next one)

# Results by image, under names that say what was measured: a store that outlives the process makes evaluate() go on.
Memory = MutableMapping[str, Tensor]

LONGEST_REACH = 16  # the paper states none; with this one its plain network's flips are met
SHORTER_REACHES = (2, 4, 6, 8, 10, 12, 14)


def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    suite: Suite = "standard",
    progress: Progress | None = None,
    generator: torch.Generator | None = None,
    *,
    autoattack_images: int = AUTOATTACK_IMAGES,
    memory: Memory | None = None,
    seed: int | None = None,
) -> Report:
    """How robust a classifier is, in which units, and whether the numbers can be trusted.

    The model is asked in eval mode and comes back as it was, also after an exception. The batch size is found by itself.

    Arguments:
        model: any classifier that takes images in [0, 1] and returns scores (B, K). With its normalization inside
            (:class:`wassersmooth.Normalized`, of one std), attacks are run in normalized units too.
        images, labels: what to measure on, where the model is. # shape: (B, C, H, W) and (B,)
        suite: ``"quick"`` (under a minute on a CPU for a small model; at most 200 images), ``"paper"`` (the paper's two
            tables), ``"publication"`` (adds AutoAttack at 8/255 and 2/255, from the extra ``attacks``), ``"standard"`` (the
            paper's with margin-loss, L2 and Wasserstein attacks, noise, deformations), ``"frontier"`` (of these, what
            a frontier compares) or ``"full"`` (the standard one with AutoAttack and common corruptions).
        progress: called as ``progress(done, total, name)`` before each measure and once at the end; between the batches of a
            long one again, with the same counts and ``"name, 384 of 2000 images"``.
        generator: where the seed of everything random comes from; without one, the global random state, which is put back.
        autoattack_images: AutoAttack, which is slow, is run on at most that many.
        memory: rows found in it are not measured again, and new ones are put into it as they come. It must belong to this
            model and these images.
        seed: instead of a generator; ``seed=report.seed`` repeats a report, all other arguments being the same.
    """
    _checks.choice("suite", suite, SUITES)
    _checks.batch("images", images)
    _model_checks.class_labels(labels, images)
    _model_checks.model_on(model, images)
    _checks.pixels("images", images)
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be a function of (done, total, name); got {progress!r}; print is one")
    autoattack_images = _checks.positive_integer("autoattack_images", autoattack_images)
    _checks.generator(generator)
    seed = _checked_seed(seed, generator)
    if suite in WITH_AUTOATTACK:
        autoattack.require_package()  # before hours of work, not after them
    with attacked(model, images) as inner:
        inner.eval()
        _ask_once(inner, images)
        if seed is None:
            device = "cpu" if generator is None else generator.device
            seed = int(torch.randint(0, 2**31, (), device=device, generator=generator))
        found = {} if memory is None else memory
        return _Evaluation(inner, images, labels, suite, seed, progress, autoattack_images, found).run()


def _ask_once(model: nn.Module, images: Tensor) -> None:
    """One image before hours of work: a model for other images says so in words of torch."""
    with torch.no_grad():
        try:
            answer(model, images[:1])
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError) as error:
            shape = " x ".join(map(str, images.shape[1:]))
            last = images.shape[-1] <= 4 < images.shape[1]
            forward = " (channels come first: .permute(0, 3, 1, 2))" if last else ""
            raise ValueError(
                f"the model cannot answer images of {shape} in eval mode ({_checks.first_line(error, 120)}); convert them to "
                f"the channels and size that it was made for{forward}, or hand over another model"
            ) from error


class _Evaluation:
    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        suite: Suite,
        seed: int,
        progress: Progress | None,
        autoattack_images: int,
        memory: Memory,
    ) -> None:
        self.model, self.suite, self.seed = model, suite, seed
        self.autoattack_images, self.memory = autoattack_images, memory
        self.progress = progress or (lambda done, total, name: None)
        self.limits: Limits = LIMITS[suite]
        self.measurement = Measurement(model, images, labels, seed)

    def run(self) -> Report:
        findings = asked_again(self.measurement, self.limits.probes)
        units = find_units(self.model)
        normalization = units[0] if len(units) == 1 else None  # the units of an ensemble may differ
        size = (self.measurement.images.shape[-2], self.measurement.images.shape[-1])
        random = any(finding.name == RANDOM for finding in findings)
        plan = rows(self.suite, size, normalization is not None, random, self.autoattack_images)
        axes = [axis for axis, pixels in zip(AXES, reversed(size), strict=True) if pixels > 1]  # one pixel cannot move
        total = len(plan) + len(axes) + 1

        table: dict[str, Tensor] = {}
        entries = []
        for done, row in enumerate(plan):
            self._announce(done, total, row.name)
            table[row.name] = self._wrong(row)
            entries.append(_entry(row.name, table[row.name], row.description, row.epsilon, row.units, row.norm))
        translations: list[list[Flips]] = []
        for done, axis in enumerate(axes, len(plan)):
            self._announce(done, total, f"flips_{axis}")
            translations.append(self._flips(axis))
        self._announce(total - 1, total, "masking")
        checks = MaskingChecks(self.measurement, table, self.limits)
        findings = findings + checks.run()
        self.progress(total, total, "done")
        probes = tuple(_entry(name, wrong, checks.descriptions[name]) for name, wrong in checks.probes.items())
        std = None if normalization is None else tuple(normalization.std.flatten().tolist())
        longest, shorter = (tuple(part) for part in ([f[-1] for f in translations], [g for f in translations for g in f[:-1]]))
        return Report(self.suite, self.seed, tuple(entries), probes, longest, findings, std, shorter)

    def _announce(self, done: int, total: int, name: str) -> None:
        """Also while it is measured, so that nobody takes a long measure for a stuck one."""
        progress = self.progress  # of its own: through self a cycle would keep all images until the collector comes
        progress(done, total, name)
        self.measurement.between_batches = lambda seen, images: progress(done, total, f"{name}, {seen} of {images} images")

    def _wrong(self, row: Row) -> Tensor:
        limit = min(row.images or len(self.measurement.images), self.limits.images or len(self.measurement.images))
        return self._remembered(
            f"{row.name} {row.description}", limit, lambda: self.measurement.wrong(row.name, row.perturb, limit)
        )

    def _flips(self, axis: Axis) -> list[Flips]:
        """The flips within each reach, the longest last."""
        height, width = self.measurement.images.shape[-2:]
        reach = min(LONGEST_REACH, (width if axis == "horizontal" else height) // 2)

        def ask(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            return label_changes(self.model, images, axis, reach)

        changes = self._remembered(
            f"flips_{axis} reach {reach}",
            self.limits.flips,
            lambda: self.measurement.collect(f"flips_{axis}", ask, self.limits.flips),
        )
        return [self._within(axis, changes, r) for r in (*(r for r in SHORTER_REACHES if r < reach), reach)]

    def _within(self, axis: str, changes: Tensor, reach: int) -> Flips:
        middle = changes.shape[1] // 2
        flips = changes[:, middle - reach : middle + reach].sum(1).double()
        resampling = torch.Generator().manual_seed(self.measurement.seed_of(f"bootstrap {axis}"))
        low, high = bootstrap(flips, resampling)
        return Flips(axis, flips.mean().item(), low, high, len(flips), reach)

    def _remembered(self, what: str, limit: int, measure: Callable[[], Tensor]) -> Tensor:
        """Everything that decides a result is in its name, but the model and the images: the memory belongs to those."""
        name = f"{what}, seed {self.seed}, {min(limit, len(self.measurement.images))} of {len(self.measurement.images)} images"
        if name not in self.memory:
            self.memory[name] = measure()
        return self.memory[name]


def _checked_seed(seed: object, generator: object) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, or None; got {seed!r}; report.seed is one")
    if generator is not None:
        raise ValueError(f"the seed must come from one place; got seed={seed} and a generator; leave one of them out")
    return int(seed)


def _entry(name: str, wrong: Tensor, description: str, epsilon: float | None = None, units: str = "", norm: str = "") -> Entry:
    low, high = wilson(int(wrong.sum()), len(wrong))
    return Entry(name, 100 * wrong.double().mean().item(), low, high, len(wrong), description, epsilon, units, norm)
