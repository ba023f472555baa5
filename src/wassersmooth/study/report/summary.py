"""The paragraph at the top of a report, computed from the numbers: what was done, what came out, and what it does not show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from wassersmooth.robustness.report import UNMASKED
from wassersmooth.study.estimates import Estimate
from wassersmooth.study.report.data import Group, MeasuredOn, Study
from wassersmooth.study.report.tables import UNITS
from wassersmooth.study.tables import listed

Measure = tuple[str, list[tuple[Group, Estimate]]]  # where, and what each group has there

GUESSING = 80.0  # percent
MOST_NAMES = 6  # of runs in one sentence

# The attack that the text speaks of: the strongest of these that every group has.
HEADLINE = ("autoattack_8_pixel", "pgd20_margin_8_pixel", "ifgsm20_8_pixel", "fgsm_8_pixel")
SPOKEN = {
    "autoattack_8_pixel": "AutoAttack at 8/255",
    "pgd20_margin_8_pixel": "20 margin-loss PGD steps at 8/255",
    "ifgsm20_8_pixel": "I-FGSM-20 at 8/255",
    "fgsm_8_pixel": "FGSM at 8/255",
    "ifgsm20_8_normalized": "I-FGSM-20 at 8/255",
}


def summary(study: Study) -> tuple[str, str]:
    """What was done and what it shows, and the numbers behind it with what they do not show; plain text."""
    numbers, compared = _numbers_of(study)
    compared = compared if _comparable(study) else []
    lead = (_what(study), *_against_none(study, compared), *_comparison(study, compared))
    detail = (*numbers, _masking(study), _collapsed(study), _caveat(study))
    return " ".join(filter(None, lead)), " ".join(filter(None, detail))


def subtitle(study: Study) -> str:
    """Data set, model, epochs and seeds in one line."""
    parts = [", ".join(map(str, study.settings(key))) for key in ("dataset", "model")]
    epochs = ", ".join(f"{value}" for value in study.settings("epochs"))
    parts += [f"{epochs} epochs"] if epochs else []
    seeds = sorted({len(group.runs) for group in study.groups})
    parts += [f"{_span(seeds)} seed{'s' * (seeds != [1])}"] if seeds else []
    return " · ".join(filter(None, parts))


def not_alike(study: Study) -> str:
    """One line about runs that were measured otherwise than most: their numbers may not compare; empty where there is none."""
    measured = {run.name: found for run in study.runs if (found := run.measured_on) is not None}
    ways = Counter(measured.values())
    if len(ways) < 2:
        return ""
    usual = max(ways, key=lambda way: (ways[way], way.images or 0))
    odd = {name: way for name, way in measured.items() if way != usual}
    named = [f"{name} ({_spoken(way, usual)})" for name, way in list(odd.items())[:MOST_NAMES]]
    more = [f"{len(odd) - MOST_NAMES} more"] if len(odd) > MOST_NAMES else []
    same_images = all(way.same_images(usual) for way in odd.values())
    means = "rows that only one suite has are blank for the others" if same_images else "their errors do not compare"
    count = f" --test-images {usual.images}" if any(way.suite == usual.suite for way in odd.values()) and usual.images else ""
    return (
        f"Not all runs were measured alike: {listed(named + more)}; the others: {_spoken(usual)}; {means}; "
        f"to measure all alike: wassersmooth evaluate FOLDER --suite {usual.suite}{count}"
    )


def _comparable(study: Study) -> bool:
    """Whether all errors are those of the same images: only then does the text compare them."""
    ways = [found for run in study.runs if (found := run.measured_on) is not None]
    return all(way.same_images(ways[0]) for way in ways)


def _spoken(way: MeasuredOn, usual: MeasuredOn | None = None) -> str:
    other = "other " if usual is not None and usual.images == way.images and not way.same_images(usual) else ""
    return f"suite {way.suite}, {way.images or 'unknown'} {other}test images"


def _what(study: Study) -> str:
    runs = len(study.runs)
    if not runs:
        return "No run of this study could be read."
    kinds = listed([group.name if group.kind != "none" else "no penalty" for group in study.groups])
    trained = f"{runs} network{'s' * (runs != 1)} {'were' if runs != 1 else 'was'} trained"
    dataset = listed([str(value) for value in study.settings("dataset")])
    return f"{trained}{f' on {dataset}' if dataset else ''}, with {kinds}."


def _numbers_of(study: Study) -> tuple[list[str], list[Measure]]:
    """A sentence for each thing measured, and the same numbers for the comparison."""
    clean = _measured(study, "clean")
    if not clean:
        return (["No run has been evaluated yet."] if study.runs else []), []
    sentences = [f"The error on clean test images is {_numbers(study, clean)} %."]
    compared: list[Measure] = [("on clean images", clean)]
    named = [name for name in HEADLINE if len(_measured(study, name)) == len(clean)]
    for name in (*named[:1], "ifgsm20_8_normalized"):
        found = _measured(study, name)
        if found:
            units = UNITS["normalized" if name.endswith("normalized") else "pixel"][0].removeprefix("ε ")
            sentences.append(f"Under {SPOKEN[name]} {units} it is {_numbers(study, found)} %.")
            compared.append((f"under {SPOKEN[name]} {units}", found))
    for axis in ("horizontal", "vertical"):
        flips = [(group, estimate) for group in study.groups if (estimate := group.flips(axis)) is not None]
        if flips:
            sentences.append(f"Along a {axis} translation the label flips {_numbers(study, flips, 2)} times.")
            compared.append((f"in {axis} label flips", flips))
    return sentences, compared


def _against_none(study: Study, measures: Sequence[Measure]) -> list[str]:
    """Whether penalties help under attack at all; in pixel units, which everybody means by 8/255."""
    for words, found in measures:
        plain = next((estimate for group, estimate in found if group.kind == "none"), None)
        others = [(_called(study, group), estimate) for group, estimate in found if group.kind != "none"]
        if not words.endswith("pixel units") or plain is None or not others:
            continue
        better = [title for title, estimate in others if estimate.clear_of(plain) and estimate.mean < plain.mean]
        if not better:
            return [f"None of the penalties lowers the error {words} {_beyond(found)}."]
        lower = f"{listed(better)} lower{'s' * (len(better) == 1)}"
        return [f"Compared with no penalty, {lower} the error {words} {_beyond(found)}."]
    return []


def _comparison(study: Study, measures: Sequence[Measure]) -> list[str]:
    """Whether Wasserstein and Euclidean can be told apart: the paper's question. Of several strengths, the first of each."""
    evaluated = [group for _, found in measures[:1] for group, _ in found]
    first = {group.kind: group for group in reversed(evaluated)}
    euclidean, wasserstein = first.get("euclidean"), first.get("wasserstein")
    if euclidean is None or wasserstein is None:
        return []
    verdicts: dict[str, list[str]] = {"better": [], "worse": [], "": []}
    pairs: list[tuple[Group, Estimate]] = []
    for words, found in measures:
        pair = [(group, estimate) for group, estimate in found if group is euclidean or group is wasserstein]
        if len(pair) == 2:
            straight, moved = pair[0][1], pair[1][1]  # groups come in the paper's order
            kind = ("better" if moved.mean < straight.mean else "worse") if moved.clear_of(straight) else ""
            verdicts[kind].append(words)
            pairs += pair
    if not pairs:
        return []
    beyond = _beyond(pairs)
    one, other = (f" ({g.detail})" if study.has_another(g) else "" for g in (wasserstein, euclidean))
    sentences = [
        f"The Wasserstein penalty{one} is {kind} than the Euclidean one{other} {beyond} {listed(where)}."
        for kind, where in verdicts.items()
        if kind and where
    ]
    if verdicts[""] and not sentences:
        apart = f"cannot be told from the Euclidean one{other} {beyond}, be it"
        sentences = [f"The Wasserstein penalty{one} {apart} {listed(verdicts[''], 'or')}."]
    elif verdicts[""]:
        sentences.append(f"The two cannot be told apart {listed(verdicts[''])}.")
    return sentences + (["Other strengths of a penalty are in the tables, and not compared here."] if one or other else [])


def _beyond(found: Sequence[tuple[Group, Estimate]]) -> str:
    """What a difference is beyond: with one seed, the luck of training is not covered."""
    return "beyond chance" if all(estimate.seeds > 1 for _, estimate in found) else "beyond the choice of test images"


def _masking(study: Study) -> str:
    verdicts = [str(run.evaluation["verdict"]) for run in study.runs if run.evaluation and "verdict" in run.evaluation]
    if not verdicts:
        return ""
    masked, unmasked = sum(v.startswith("masked") for v in verdicts), sum(v == UNMASKED for v in verdicts)
    if not masked and unmasked < len(verdicts):  # too few images, or a network that learned nothing
        found = f"The checks found no sign of gradient masking in {unmasked} of {len(verdicts)} evaluated runs"
        return f"{found}; of the others they say nothing."
    if not masked:
        return (
            f"The checks found no sign of gradient masking in any of the {len(verdicts)} evaluated runs."
            if len(verdicts) > 1
            else ("The checks found no sign of gradient masking.")
        )
    return (
        f"{masked} of {len(verdicts)} evaluated runs show signs of gradient masking, so their errors under attack are too low."
    )


def _collapsed(study: Study) -> str:
    """Networks that guess look wonderfully stable: no attack and no translation changes what they say."""
    guessing = [run.name for run in study.runs if (run.error("clean") or 0.0) >= GUESSING]
    if not guessing:
        return ""
    return (
        f"Beware: {len(guessing)} of {len(study.runs)} networks hardly learned anything (clean error of {GUESSING:.0f} % or "
        f"more: {listed(guessing)}), which makes means and intervals meaningless for them."
    )


def _caveat(study: Study) -> str:
    if study.groups and max(len(group.runs) for group in study.groups) == 1:
        return "There is one seed for each setting: the intervals cover the choice of test images, not the luck of training."
    if study.groups and min(len(group.runs) for group in study.groups) < 3:
        return "With two seeds or fewer, t-intervals are very wide; more seeds would say more."
    return ""


def _measured(study: Study, name: str) -> list[tuple[Group, Estimate]]:
    return [(group, estimate) for group in study.groups if (estimate := group.error(name)) is not None]


def _numbers(study: Study, found: Sequence[tuple[Group, Estimate]], digits: int = 1) -> str:
    return listed([f"{estimate.mean:.{digits}f} ({_called(study, group)})" for group, estimate in found])


def _called(study: Study, group: Group) -> str:
    """A group in a sentence: by its title, and by its strength where another one bears that title too."""
    title = "none" if group.kind == "none" else group.title
    return f"{title}, {group.detail}" if study.has_another(group) and group.detail else title


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
