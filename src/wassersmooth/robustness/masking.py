"""Whether measured robustness can be trusted: checks for gradient masking, each with a name and evidence.

A gradient attack fails if the model is robust, or if its gradient is useless. The checks here look for signs of the second
(Athalye et al., 2018; Carlini et al., 2019). A finding needs proof: another attack whose error is significantly larger on the
same images (:func:`~wassersmooth.robustness.intervals.beats`), or gradients that are zero or not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wassersmooth.geometry.randomness import standard_normal
from wassersmooth.model_state import logits_of
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD, Square
from wassersmooth.robustness.balls import Norm
from wassersmooth.robustness.findings import Finding, compare_errors, percent
from wassersmooth.robustness.intervals import beats, wilson
from wassersmooth.robustness.measurement import Measurement, Perturbation
from wassersmooth.robustness.model_queries import input_gradient, isolated_model, scores
from wassersmooth.robustness.noise import sign_noise
from wassersmooth.robustness.report import FEWEST, ONE_ANSWER, TOO_WEAK
from wassersmooth.robustness.suites import AUTOATTACK_LEVELS, Limits

LEVELS = (8, 25, 64)  # sizes of the probes in 1/255; the next one only if no attack of the last one was decisive
DECISIVE = 50.0  # percent: an error that distinguishes working attacks from failing ones
NOISE_DRAWS = 10
SMOOTHING = 8 / 255  # standard deviation of the noise in Smoothed
SMOOTHING_DRAWS = 4
NEAR_100 = 95.0  # percent: an unbounded attack whose interval is below this fails
SUM_TOLERANCE = 5e-3  # how far from 1 the sum of probabilities may be, after rounding to bfloat16
BROKEN_SHARE = 5.0  # percent of images without a usable gradient; an interval above it is not chance


class MaskingChecks:
    """Run the probes that the checks need and compare them, always on the same images.

    Arguments:
        measurement: the model and the images.
        table: which images are misclassified in each row of the report. # shape of each: (B,) bool
        limits: how many images and queries to use.
    """

    def __init__(self, measurement: Measurement, table: dict[str, Tensor], limits: Limits) -> None:
        self.measurement, self.table, self.limits = measurement, table, limits
        self.count = min(limits.probes, len(measurement.images))
        self.probes: dict[str, Tensor] = {}
        self.descriptions: dict[str, str] = {}

    def run(self) -> list[Finding]:
        """All findings, each kind once; the probes behind them are in ``probes``."""
        found = self.one_answer_for_all() + self.probabilities_for_logits()
        found += self.one_step_beats_many("fgsm_8_normalized", "ifgsm20_8_normalized") + self.broken_gradients()
        for levels in LEVELS:
            found += self.compare_attacks(levels)
            strongest = max(percent(wrong) for name, wrong in self._attacks(levels).items())
            if strongest >= DECISIVE:
                break
        found += self.autoattack_beats_gradients() + self.unbounded_attack_fails()
        return list({finding.name: finding for finding in reversed(found)}.values())[::-1]  # the first of each kind

    def compare_attacks(self, levels: int) -> list[Finding]:
        """Compare the attacks of one size, ``levels / 255`` in pixels."""
        epsilon, n = levels / 255, levels
        white_box = _worst(self._cross_entropy(n) | self._margin(n))
        found = self.one_step_beats_many(f"fgsm_{n}_pixel", f"ifgsm20_{n}_pixel")
        found += self.saturated_softmax(n)
        noise = self._noise(n)
        square = Square(epsilon, self.limits.square_queries)
        challengers = (
            ("noise_beats_gradient", f"random signs, the best of {NOISE_DRAWS} draws, do more harm than any gradient", noise),
            (
                "black_box_beats_white_box",
                f"the Square attack ({square.queries} queries, no gradients) beats every gradient attack of the same size",
                self._probe(f"square_{n}_pixel", square),
            ),
            (
                "transfer_beats_white_box",
                "adversarial images of the model averaged over noise do more harm than the model's own",
                self._probe(f"transfer_{n}_pixel", *_transfer_from_smoothed(epsilon)),
            ),
        )
        for name, text, wrong in challengers:
            if beats(wrong, white_box[1]):
                found.append(compare_errors(name, text, f"{n}/255", wrong, *white_box))
        return found

    def attacks_too_weak(self, epsilon: float, norm: Norm, wrong: Tensor) -> list[Finding]:
        """Whether a probe, at most epsilon in size, beats all attacks of the suite up to epsilon together.

        Then the number that is reported is too low, whatever the reason: steps too short or too few, or a flat loss.

        Arguments:
            wrong: which images are wrong as they are, or under any of these attacks. # shape: (B,) bool
        """
        worst = wrong[: self.count]
        probes: dict[str, Tensor] = {}
        for levels in LEVELS if norm == "linf" else ():
            if levels / 255 <= epsilon * (1 + 1e-6):
                probes |= {name: found for name, found in self.probes.items() if name.endswith(f"_{levels}_pixel")}
        if norm == "l2" or epsilon * (1 + 1e-6) < LEVELS[0] / 255:  # no probe was run in a ball as small as this
            name = f"pgd20_margin_{norm}_{epsilon:.4g}"
            probes[name] = self._probe(name, PGD(epsilon, epsilon / 4, 20, norm=norm, loss="margin"))
        if not probes:
            return []
        name, found = _worst(probes)
        stronger = found[: len(worst)]
        if not beats(stronger, worst):
            return []
        text = "a probe does more harm than all attacks of the suite up to its size"
        ours = f"the attacks up to epsilon {epsilon:.4g}"
        return [compare_errors(TOO_WEAK, text, name, stronger, ours, worst)]

    def one_step_beats_many(self, one_step: str, many_steps: str) -> list[Finding]:
        """Whether FGSM beats the iterated attack inside the same ball."""
        both = self.table | self.probes
        if one_step not in both or many_steps not in both:
            return []
        count = min(len(both[one_step]), len(both[many_steps]))  # a probe may have fewer images than the table
        one, many = both[one_step][:count], both[many_steps][:count]
        if not beats(one, many):
            return []
        text = "one gradient step does more harm than twenty inside the same ball"
        return [compare_errors("one_step_beats_many", text, one_step, one, many_steps, many)]

    def broken_gradients(self) -> list[Finding]:
        """Whether gradients are exactly zero or not finite: those of the margin, because it does not saturate."""

        def largest(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with isolated_model(self.measurement.model, images) as model:
                g = input_gradient(model, images, labels, "margin").flatten(1)
            return torch.where(g.isfinite().all(1), g.abs().amax(1), torch.nan)

        size = self.measurement.collect("margin gradient", largest, self.count)
        found = []
        for name, text, broken in (
            ("gradients_vanish", "exactly zero", size == 0),
            ("gradients_not_finite", "not finite", size.isnan()),
        ):
            low, high = wilson(int(broken.sum()), self.count)
            if low > BROKEN_SHARE:
                share = percent(broken)
                evidence = f"the gradient is {text} on {share:.1f} % of {self.count} images (interval {low:.1f} to {high:.1f})"
                found.append(Finding(name, evidence, {"share": share, "low": low, "high": high}))
        return found

    def one_answer_for_all(self) -> list[Finding]:
        """Whether the model predicts one class for all images, which no attack can change."""
        labels = self.measurement.labels[: self.count].tolist()
        classes = set(labels)
        if self.count < FEWEST or len(classes) == 1:
            return []
        predicted = set(self._predicted("answers").tolist())
        others = sum(label not in predicted for label in labels)
        if len(predicted) > 1 or wilson(others, self.count)[0] <= BROKEN_SHARE:  # correct if nearly all are of one class
            return []
        evidence = (
            f"all of {self.count} images of {len(classes)} classes get the label {next(iter(predicted))}, so that errors and "
            "flips say nothing about robustness; train the model first, or check its weights"
        )
        return [Finding(ONE_ANSWER, evidence, {"images": float(self.count), "classes": float(len(classes))})]

    def probabilities_for_logits(self) -> list[Finding]:
        """Whether the model returns probabilities: a confident softmax has no gradient, and cross-entropy adds a second one."""

        def is_distribution(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                outputs = scores(self.measurement.model, images).float()
            return (outputs >= 0).all(1) & ((outputs.sum(1) - 1).abs() <= SUM_TOLERANCE)

        if self.count < FEWEST or not self.measurement.collect("probabilities", is_distribution, self.count).all():
            return []
        evidence = (
            f"the outputs are at least 0 and sum to 1 on all of {self.count} images, as after a softmax, which flattens the "
            "loss that attacks climb, so that errors may be far too low; return logits, or the logarithm of these outputs"
        )
        return [Finding("probabilities_for_logits", evidence, {"images": float(self.count)})]

    def saturated_softmax(self, levels: int) -> list[Finding]:
        """Whether a margin loss beats the cross-entropy, which has no gradient where the softmax rounds to 1.

        It is compared with the cross-entropy attacks alone: among all gradient attacks it would be compared with itself.
        """

        def saturated(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                return scores(self.measurement.model, images).softmax(1).amax(1) == 1

        name, worst = _worst(self._cross_entropy(levels))
        margin_name, margin = _worst(self._margin(levels))
        share = percent(self.measurement.collect("saturation", saturated, self.count))
        if share <= BROKEN_SHARE or not beats(margin, worst):
            return []
        text = f"the softmax is 1 to rounding on {share:.1f} % of the images, which hides what a margin loss finds"
        return [compare_errors("saturated_softmax", text, margin_name, margin, name, worst)]

    def autoattack_beats_gradients(self) -> list[Finding]:
        """Whether AutoAttack, if it is in the table, beats all gradient attacks of the same size together.

        AutoAttack keeps the best of an ensemble for each image, so it is compared with the images that any other attack
        fools: it beats a single attack of 20 steps on honestly trained networks, too. If it still beats them, an attack with
        more steps and restarts is added, because too few steps are not masking.
        """
        found = []
        for levels in AUTOATTACK_LEVELS:
            name, epsilon = f"autoattack_{levels}_pixel", levels / 255
            if name not in self.table:
                continue
            wrong = self.table[name][: self.count]  # AutoAttack may have had fewer images than the probes
            fooled = _fooled_by_any(self._cross_entropy(levels) | self._margin(levels))[: len(wrong)]
            if beats(wrong, fooled):
                patient = PGD(epsilon, epsilon / 10, 50, restarts=5, loss="margin")
                fooled = fooled | self._probe(f"pgd50x5_margin_{levels}_pixel", patient)[: len(wrong)]
            if beats(wrong, fooled):
                text = "AutoAttack does more harm than all gradient attacks of its size together, one with more steps included"
                found.append(compare_errors("autoattack_beats_gradients", text, name, wrong, "any gradient attack", fooled))
        return found

    def unbounded_attack_fails(self) -> list[Finding]:
        """Whether an attack with epsilon = 1, which allows any image, stays clearly below an error of 100 %.

        It is compared with an attack without gradients: each image is replaced by another one of the set, of another class.
        """
        unbounded = self._probe("unbounded_pgd20", PGD(1.0, 0.1, 20, random_start=False, loss="margin"))
        high = wilson(int(unbounded.sum()), self.count)[1]
        exchanged = self._exchanged()
        self._record("another_image", exchanged, "some other image of the set in its place")
        if high >= NEAR_100 or not beats(exchanged, unbounded):
            return []
        text = f"with any image allowed (epsilon 1), the gradient attack stays below {NEAR_100:g} %"
        return [compare_errors("unbounded_attack_fails", text, "another image in its place", exchanged, "unbounded", unbounded)]

    def _exchanged(self) -> Tensor:
        """Whether some image of the set is predicted as another class than this image's label. # shape: (count,) bool"""
        labels = self.measurement.labels[: self.count].cpu()
        return (self._predicted("exchange")[None, :] != labels[:, None]).any(1)

    def _predicted(self, name: str) -> Tensor:
        """The labels of the images, as a measure of this name. # shape: (count,)"""

        def predict(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                return scores(self.measurement.model, images).argmax(1)

        return self.measurement.collect(name, predict, self.count)

    def _noise(self, levels: int) -> Tensor:
        """Which images are misclassified under any of several draws of random signs."""
        wrong = torch.zeros(self.count, dtype=torch.bool, device="cpu")
        for draw in range(NOISE_DRAWS):
            wrong |= self.measurement.misclassified(f"noise {levels} {draw}", _sign_noise(levels / 255), self.count)
        name = f"noise_best_of_{NOISE_DRAWS}_{levels}_pixel"
        return self._record(name, wrong, f"+-{levels}/255 at random, wrong under any of {NOISE_DRAWS} draws")

    def _attacks(self, levels: int) -> dict[str, Tensor]:
        """All measured attacks of this size in pixels, on the images of the probes."""
        both = {name: wrong[: self.count] for name, wrong in (self.table | self.probes).items()}
        return {name: wrong for name, wrong in both.items() if name.endswith(f"_{levels}_pixel")}

    def _cross_entropy(self, levels: int) -> dict[str, Tensor]:
        """The attacks of this size that raise the cross-entropy."""
        epsilon = levels / 255
        attacks = {f"fgsm_{levels}_pixel": FGSM(epsilon), f"ifgsm20_{levels}_pixel": IFGSM(epsilon, epsilon / 4, 20)}
        return {name: self._probe(name, attack) for name, attack in attacks.items()}

    def _margin(self, levels: int) -> dict[str, Tensor]:
        """The attack of this size that raises the margin."""
        name, epsilon = f"pgd20_margin_{levels}_pixel", levels / 255
        return {name: self._probe(name, PGD(epsilon, epsilon / 4, 20, loss="margin"))}

    def _probe(self, name: str, perturb: Perturbation, description: str = "") -> Tensor:
        """Which of the probes' images are misclassified; measured unless the table has it."""
        if name in self.table:
            return self.table[name][: self.count]
        if name not in self.probes:
            self._record(name, self.measurement.misclassified(name, perturb, self.count), description or repr(perturb))
        return self.probes[name]

    def _record(self, name: str, wrong: Tensor, description: str) -> Tensor:
        self.probes[name], self.descriptions[name] = wrong, description
        return wrong


class Smoothed(nn.Module):
    """A model whose scores are averaged over white noise, so that its gradient ignores small-scale oscillations."""

    def __init__(self, model: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for _ in range(SMOOTHING_DRAWS):
            noise = standard_normal(images.shape, images, self.generator)
            noisy = (images + SMOOTHING * noise).clamp(0, 1).detach()  # the model may refuse other images
            total = total + logits_of(self.model(noisy + (images - images.detach())))  # clipping must not zero the gradient
        assert isinstance(total, Tensor)
        return total / SMOOTHING_DRAWS


def _worst(attacks: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The attack with the largest error, and the images that it fools."""
    return max(attacks.items(), key=lambda item: int(item[1].sum()))


def _fooled_by_any(attacks: dict[str, Tensor]) -> Tensor:
    """Which images at least one of the attacks fools. # shape: (B,) bool"""
    return torch.stack(list(attacks.values())).any(0)


def _sign_noise(size: float) -> Perturbation:
    return lambda model, images, labels, generator: sign_noise(images, size, generator)


def _transfer_from_smoothed(epsilon: float) -> tuple[Perturbation, str]:
    """Attack the model averaged over noise, which repairs shattered gradients."""
    attack = PGD(epsilon, epsilon / 4, 10, loss="margin")

    def perturb(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return attack(Smoothed(model, generator), images, labels, generator)

    return perturb, f"{attack!r} of the model averaged over {SMOOTHING_DRAWS} draws of noise"
