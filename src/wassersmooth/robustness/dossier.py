"""evaluate(): how robust any classifier is, in which units, and whether the numbers can be trusted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.normalized import find_normalization
from wassersmooth.robustness import autoattack
from wassersmooth.robustness.classifier import attacked
from wassersmooth.robustness.intervals import bootstrap, wilson
from wassersmooth.robustness.masking import MaskingChecks, answers_at_random
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.report import Entry, Flips, Report
from wassersmooth.robustness.suites import LIMITS, SUITES, Limits, rows
from wassersmooth.robustness.translations import AXES, label_flips

Progress = Callable[[int, int, str], None]  # (measures done, measures in all, name of the next one)

LONGEST_REACH = 16  # the paper's


def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    suite: str = "standard",
    progress: Progress | None = None,
    generator: torch.Generator | None = None,
) -> Report:
    """How robust a classifier is, in which units, and whether the numbers can be trusted.

    The model is asked in eval mode and comes back as it was, also after an exception. The batch size is found by itself.

    Arguments:
        model: any classifier that takes images in [0, 1] and returns scores (B, K). With its normalization inside
            (:class:`wassersmooth.Normalized`), attacks are run in normalized units too.
        images, labels: what to measure on, where the model is. # shape: (B, C, H, W) and (B,)
        suite: ``"quick"`` (under a minute on a CPU for a small model; at most 200 images), ``"paper"`` (the paper's two
            tables), ``"standard"`` (adds margin-loss, L2 and Wasserstein attacks, noise, deformations) or ``"full"`` (adds
            AutoAttack, from the extra ``attacks``, and common corruptions).
        progress: called as ``progress(done, total, name)`` before each measure and once at the end.
        generator: where the seed of everything random comes from; without one, the global random state, which is put back.
    """
    _checks.choice("suite", suite, SUITES)
    _checks.batch("images", images)
    _checks.class_labels(labels, images)
    _checks.model_on(model, images)
    _checks.pixels("images", images)
    if suite == "full":
        autoattack.require_package()  # before hours of work, not after them
    with attacked(model, images) as inner:
        inner.eval()
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(0, 2**31, (), device=device, generator=generator))
        return _Evaluation(inner, images, labels, suite, seed, progress).run()


class _Evaluation:
    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, suite: str, seed: int, progress: Progress | None
    ) -> None:
        self.model, self.suite, self.seed = model, suite, seed
        self.progress = progress or (lambda done, total, name: None)
        self.limits: Limits = LIMITS[suite]
        self.measurement = Measurement(model, images, labels, seed)

    def run(self) -> Report:
        findings = answers_at_random(self.measurement, self.limits.probes)
        normalization = find_normalization(self.model)
        size = (self.measurement.images.shape[-2], self.measurement.images.shape[-1])
        plan = rows(self.suite, size, normalization is not None, random=bool(findings))
        axes = [axis for axis, pixels in zip(AXES, reversed(size), strict=True) if pixels > 1]  # one pixel cannot move
        total = len(plan) + len(axes) + 1

        table: dict[str, Tensor] = {}
        entries = []
        for done, row in enumerate(plan):
            self.progress(done, total, row.name)
            table[row.name] = self.measurement.wrong(row.name, row.perturb, self.limits.images)
            entries.append(_entry(row.name, table[row.name], row.description, row.epsilon, row.units, row.norm))
        translations = []
        for done, axis in enumerate(axes, len(plan)):
            self.progress(done, total, f"flips_{axis}")
            translations.append(self._flips(axis))
        self.progress(total - 1, total, "masking")
        checks = MaskingChecks(self.measurement, table, self.limits)
        findings = findings + checks.run()
        self.progress(total, total, "done")
        probes = tuple(_entry(name, wrong, checks.descriptions[name]) for name, wrong in checks.probes.items())
        std = None if normalization is None else tuple(normalization.std.flatten().tolist())
        return Report(self.suite, self.seed, tuple(entries), probes, tuple(translations), findings, std)

    def _flips(self, axis: str) -> Flips:
        height, width = self.measurement.images.shape[-2:]
        reach = min(LONGEST_REACH, (width if axis == "horizontal" else height) // 2)

        def count(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            return label_flips(self.model, images, axis, reach)  # type: ignore[arg-type]

        flips = self.measurement.collect(f"flips_{axis}", count, self.limits.flips).double()
        resampling = torch.Generator().manual_seed(self.measurement.seed_of(f"bootstrap {axis}"))
        low, high = bootstrap(flips, resampling)
        return Flips(axis, flips.mean().item(), low, high, len(flips), reach)


def _entry(name: str, wrong: Tensor, description: str, epsilon: float | None = None, units: str = "", norm: str = "") -> Entry:
    low, high = wilson(int(wrong.sum()), len(wrong))
    return Entry(name, 100 * wrong.double().mean().item(), low, high, len(wrong), description, epsilon, units, norm)
