"""Whether measured robustness can be trusted: signs of gradient masking, each named and with its evidence.

A gradient attack that fails says "robust" or "the gradient is of no use". The signs of the second (Athalye et al., 2018;
Carlini et al., 2019) are looked for here. Nobody is accused on a hunch: a finding stands only where the worst error found
so far is beaten beyond its interval, on the same images (:func:`~wassersmooth.robustness.intervals.beats`), or where a
gradient is broken outright.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wassersmooth.geometry.randomness import standard_normal
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD, Square
from wassersmooth.robustness.classifier import attacked, gradient, scores
from wassersmooth.robustness.findings import Finding, comparison, percent
from wassersmooth.robustness.intervals import beats, wilson
from wassersmooth.robustness.measurement import Measurement, Perturbation
from wassersmooth.robustness.noise import sign_noise
from wassersmooth.robustness.report import FEWEST, ONE_ANSWER
from wassersmooth.robustness.suites import AUTOATTACK_LEVELS, Limits

LEVELS = (8, 25, 64)  # sizes of the probes in 1/255; the next one only where no attack of the last one was decisive
DECISIVE = 50.0  # percent: an error that tells working attacks from failing ones
NOISE_DRAWS = 10
SMOOTHING = 8 / 255  # how far the smoothed copy of the model looks around
SMOOTHING_DRAWS = 4
NEAR_100 = 95.0  # an unbounded attack below this, interval included, is said to fail
ONE = 5e-3  # how far from 1 probabilities may sum to: what rounding to bfloat16 leaves of them
BROKEN_SHARE = 5.0  # percent of images without a usable gradient, interval included, that chance does not explain


class MaskingChecks:
    """Runs the probes that the checks need and compares them, always on the same images.

    Arguments:
        measurement: the model and the images.
        table: which images are wrong under each row that was reported. # shape of each: (B,) bool
        limits: how many images and queries to spend.
    """

    def __init__(self, measurement: Measurement, table: dict[str, Tensor], limits: Limits) -> None:
        self.measurement, self.table, self.limits = measurement, table, limits
        self.count = min(limits.probes, len(measurement.images))
        self.probes: dict[str, Tensor] = {}
        self.descriptions: dict[str, str] = {}

    def run(self) -> list[Finding]:
        """All findings, each kind once; the probes behind them stay in ``probes``."""
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
        """Attacks of one size, ``levels / 255`` in pixels, against each other."""
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
                found.append(comparison(name, text, f"{n}/255", wrong, *white_box))
        return found

    def one_step_beats_many(self, one_step: str, many_steps: str) -> list[Finding]:
        both = self.table | self.probes
        if one_step not in both or many_steps not in both:
            return []
        count = min(len(both[one_step]), len(both[many_steps]))  # a probe may have fewer images than the table
        one, many = both[one_step][:count], both[many_steps][:count]
        if not beats(one, many):
            return []
        text = "one gradient step does more harm than twenty inside the same ball"
        return [comparison("one_step_beats_many", text, one_step, one, many_steps, many)]

    def broken_gradients(self) -> list[Finding]:
        """Gradients of the margin that are exactly zero or not finite: of the margin, because it does not saturate."""

        def largest(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with attacked(self.measurement.model, images) as model:
                g = gradient(model, images, labels, "margin").flatten(1)
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
        """A model that always says the same is steady under every attack, and knows nothing."""

        def answers(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                return scores(self.measurement.model, images).argmax(1)

        labels = self.measurement.labels[: self.count].tolist()
        known = set(labels)
        if self.count < FEWEST or len(known) == 1:
            return []
        given = set(self.measurement.collect("answers", answers, self.count).tolist())
        others = sum(label not in given for label in labels)
        if len(given) > 1 or wilson(others, self.count)[0] <= BROKEN_SHARE:  # where nearly all are of one class, it is right
            return []
        evidence = (
            f"all of {self.count} images of {len(known)} classes get the label {next(iter(given))}, so that errors and flips "
            "say nothing about robustness; train the model first, or check its weights"
        )
        return [Finding(ONE_ANSWER, evidence, {"images": float(self.count), "classes": float(len(known))})]

    def probabilities_for_logits(self) -> list[Finding]:
        """Outputs of a softmax: gradients vanish in it where it is sure, and the cross-entropy takes another one of them."""

        def is_distribution(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                outputs = scores(self.measurement.model, images).float()
            return (outputs >= 0).all(1) & ((outputs.sum(1) - 1).abs() <= ONE)

        if self.count < FEWEST or not self.measurement.collect("probabilities", is_distribution, self.count).all():
            return []
        evidence = (
            f"the outputs are at least 0 and sum to 1 on all of {self.count} images, as after a softmax, which flattens what "
            "attacks climb, so that errors may be far too low; return logits, or the logarithm of these outputs"
        )
        return [Finding("probabilities_for_logits", evidence, {"images": float(self.count)})]

    def saturated_softmax(self, levels: int) -> list[Finding]:
        """The cross-entropy has no gradient where the softmax is 1 to rounding; a margin loss then finds more.

        More than the cross-entropy attacks: among all gradient attacks of a table, the margin's would be its own champion.
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
        return [comparison("saturated_softmax", text, margin_name, margin, name, worst)]

    def autoattack_beats_gradients(self) -> list[Finding]:
        """AutoAttack, where the table has it, against the gradient attacks of the same size, all together.

        AutoAttack keeps the best of an ensemble for each image, so its match is what any of the others fools: a single attack
        of 20 steps falls short of it on honestly trained networks too. Where it is not enough, a patient attack is asked as
        well, because too few steps are no sign of masking.
        """
        found = []
        for levels in AUTOATTACK_LEVELS:
            name, epsilon = f"autoattack_{levels}_pixel", levels / 255
            if name not in self.table:
                continue
            wrong = self.table[name][: self.count]  # AutoAttack may have had fewer images than the probes
            fooled = _any(self._cross_entropy(levels) | self._margin(levels))[: len(wrong)]
            if beats(wrong, fooled):
                patient = PGD(epsilon, epsilon / 10, 50, restarts=5, loss="margin")
                fooled = fooled | self._probe(f"pgd50x5_margin_{levels}_pixel", patient)[: len(wrong)]
            if beats(wrong, fooled):
                text = "AutoAttack does more harm than all gradient attacks of the same size together, a patient one included"
                found.append(comparison("autoattack_beats_gradients", text, name, wrong, "any gradient attack", fooled))
        return found

    def unbounded_attack_fails(self) -> list[Finding]:
        """With epsilon = 1 any image is allowed, so an attack that works reaches an error near 100 %.

        Compared with what needs no gradient at all: another image of the set, of another class, in the place of each.
        """
        unbounded = self._probe("unbounded_pgd20", PGD(1.0, 0.1, 20, random_start=False, loss="margin"))
        high = wilson(int(unbounded.sum()), self.count)[1]
        exchanged = self._exchanged()
        self._keep("another_image", exchanged, "some other image of the set in its place")
        if high >= NEAR_100 or not beats(exchanged, unbounded):
            return []
        text = f"with any image allowed (epsilon 1), the gradient attack stays below {NEAR_100:g} %"
        return [comparison("unbounded_attack_fails", text, "another image in its place", exchanged, "unbounded", unbounded)]

    def _exchanged(self) -> Tensor:
        """Whether some other image of the set, put in its place, gets another label. # shape: (count,) bool"""

        def predict(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
            with torch.no_grad():
                return scores(self.measurement.model, images).argmax(1)

        predicted = self.measurement.collect("exchange", predict, self.count)
        labels = self.measurement.labels[: self.count].cpu()
        return (predicted[None, :] != labels[:, None]).any(1)

    def _noise(self, levels: int) -> Tensor:
        """Wrong under any of several draws of random signs."""
        wrong = torch.zeros(self.count, dtype=torch.bool)
        for draw in range(NOISE_DRAWS):
            wrong |= self.measurement.wrong(f"noise {levels} {draw}", _sign_noise(levels / 255), self.count)
        name = f"noise_best_of_{NOISE_DRAWS}_{levels}_pixel"
        return self._keep(name, wrong, f"+-{levels}/255 at random, wrong under any of {NOISE_DRAWS} draws")

    def _attacks(self, levels: int) -> dict[str, Tensor]:
        """Everything of this size in pixels that was measured, on the images of the probes."""
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
        """Which of the probes' images are wrong; measured unless the table has it."""
        if name in self.table:
            return self.table[name][: self.count]
        if name not in self.probes:
            self._keep(name, self.measurement.wrong(name, perturb, self.count), description or repr(perturb))
        return self.probes[name]

    def _keep(self, name: str, wrong: Tensor, description: str) -> Tensor:
        self.probes[name], self.descriptions[name] = wrong, description
        return wrong


class Smoothed(nn.Module):
    """A model whose scores are averaged over white noise: its gradient sees the slope, not the ripples."""

    def __init__(self, model: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for _ in range(SMOOTHING_DRAWS):
            noise = standard_normal(images.shape, images, self.generator)
            noisy = (images + SMOOTHING * noise).clamp(0, 1).detach()  # a model may know no other images
            total = total + self.model(noisy + (images - images.detach()))  # whole gradients, where clipping would cut them
        assert isinstance(total, Tensor)
        return total / SMOOTHING_DRAWS


def _worst(attacks: dict[str, Tensor]) -> tuple[str, Tensor]:
    """The attack with the largest error, and what it fools."""
    return max(attacks.items(), key=lambda item: int(item[1].sum()))


def _any(attacks: dict[str, Tensor]) -> Tensor:
    """What at least one of the attacks fools. # shape: (B,) bool"""
    return torch.stack(list(attacks.values())).any(0)


def _sign_noise(size: float) -> Perturbation:
    return lambda model, images, labels, generator: sign_noise(images, size, generator)


def _transfer_from_smoothed(epsilon: float) -> tuple[Perturbation, str]:
    """Attacks a copy of the model whose answers are averaged over noise, where shattered gradients are mended."""
    attack = PGD(epsilon, epsilon / 4, 10, loss="margin")

    def perturb(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return attack(Smoothed(model, generator), images, labels, generator)

    return perturb, f"{attack!r} of the model averaged over {SMOOTHING_DRAWS} draws of noise"
