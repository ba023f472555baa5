"""The top of a report, computed from the numbers: three answers, what was done, the results, and what they do not show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from wassersmooth.robustness.page import Answer, AnswerRow, attacked_question, trust
from wassersmooth.robustness.report import UNMASKED
from wassersmooth.robustness.summary import error_of_guessing, headline
from wassersmooth.study.estimates import Estimate
from wassersmooth.study.measures import spoken
from wassersmooth.study.report.data import Group, MeasuredOn, RunRecord, StudyRecord
from wassersmooth.study.tables import counted, listed

Measure = tuple[str, list[tuple[Group, Estimate]]]  # its name in a sentence, and its value in each group

LEARNED_NOTHING = "Learned nothing"  # how the summary of such a run begins
GUESSING = 80.0  # percent, of clean error; evaluations by earlier versions have no summary
MOST_NAMES = 6  # of runs in one sentence

# The text names the strongest of these attacks that every group has.
HEADLINE = ("autoattack_8_pixel", "pgd20_margin_8_pixel", "ifgsm20_8_pixel", "fgsm_8_pixel")


def summary(study: StudyRecord) -> tuple[str, str]:
    """Two paragraphs of plain text: what was done and what it shows; the numbers behind it and their limits."""
    numbers, compared = _numbers_of(study)
    compared = compared if _comparable(study) else []
    done = (_learned_nothing(study), _what(study), *_told(study))
    lead = (*done, *_against_none(study, compared), *_comparison(study, compared))
    detail = (*numbers, _masking(study), _caveat(study))
    return " ".join(filter(None, lead)), " ".join(filter(None, detail))


def answers(study: StudyRecord) -> tuple[Answer, ...]:
    """The three answers, a line for each group; none where nothing was measured."""
    measured = [group for group in study.groups if group.error("clean") is not None]
    if not measured:
        return ()
    question, attacked = _attacked(measured)
    return (
        Answer("Clean error", tuple(_number(study, group, group.error("clean"), _guessing(group)) for group in measured)),
        Answer(question, tuple(_number(study, group, attacked(group), _guessing(group)) for group in measured)),
        Answer("Can the attacks be trusted?", tuple(_trust(study, group) for group in measured)),
    )


def subtitle(study: StudyRecord) -> str:
    """Data set, model, epochs and seeds in one line."""
    parts = [", ".join(map(str, study.settings(key))) for key in ("dataset", "model")]
    epochs = ", ".join(f"{value}" for value in study.settings("epochs"))
    parts += [f"{epochs} epoch{'s' * (epochs != '1')}"] if epochs else []
    seeds = sorted({len(group.runs) for group in study.groups})
    parts += [f"{_span(seeds)} seed{'s' * (seeds != [1])}"] if seeds else []
    return " · ".join(filter(None, parts))


def mismatch_warning(study: StudyRecord) -> str:
    """One line about runs that were measured differently from most; empty if there are none."""
    measured = {run.name: found for run in study.runs if (found := run.measured_on) is not None}
    setups = Counter(measured.values())
    if len(setups) < 2:
        return ""
    usual = max(setups, key=lambda setup: (setups[setup], setup.images))
    odd = {name: setup for name, setup in measured.items() if setup != usual}
    named = [f"{name} ({_described(setup, usual)})" for name, setup in list(odd.items())[:MOST_NAMES]]
    more = [f"{len(odd) - MOST_NAMES} more"] if len(odd) > MOST_NAMES else []
    same_images = all(setup.same_images(usual) for setup in odd.values())
    means = "rows that only one suite has are blank for the others" if same_images else "their errors do not compare"
    count = (
        f" --test-images {usual.images}" if any(setup.suite == usual.suite for setup in odd.values()) and usual.images else ""
    )
    return (
        f"Not all runs were measured alike: {listed(named + more)}; the others: {_described(usual)}; {means}; "
        f"to measure all alike: wassersmooth evaluate FOLDER --suite {usual.suite}{count}"
    )


def _comparable(study: StudyRecord) -> bool:
    """Whether all errors are of the same images: otherwise the text does not compare them."""
    setups = [found for run in study.runs if (found := run.measured_on) is not None]
    return all(setup.same_images(setups[0]) for setup in setups)


def _described(setup: MeasuredOn, usual: MeasuredOn | None = None) -> str:
    other = "other " if usual is not None and usual.images == setup.images and not setup.same_images(usual) else ""
    return f"suite {setup.suite}, {setup.images or 'unknown'} {other}test images"


def _what(study: StudyRecord) -> str:
    runs = len(study.runs)
    if not runs:
        return "No run of this study could be read."
    kinds = listed([group.name if group.kind != "none" else "no penalty" for group in study.groups])
    trained = f"{counted(runs, 'network')} {'were' if runs != 1 else 'was'} trained"
    dataset = listed([str(value) for value in study.settings("dataset")])
    return f"{trained}{f' on {dataset}' if dataset else ''}, with {kinds}."


def _told(study: StudyRecord) -> list[str]:
    """The summary of the only run, in the words of its own page."""
    told = [said for run in study.runs if (said := run.evaluation.get("summary"))]
    return told if len(study.runs) == 1 else []


def _numbers_of(study: StudyRecord) -> tuple[list[str], list[Measure]]:
    """A sentence for each measure, and the same numbers for the comparison."""
    clean = _measured(study, "clean")
    if not clean:
        return (["No run has been evaluated yet."] if study.runs else []), []
    sentences = [f"The error on clean test images is {_numbers(study, clean)} %."]
    compared: list[Measure] = [("on clean images", clean)]
    named = [name for name in HEADLINE if len(_measured(study, name)) == len(clean)]
    for name in (*named[:1], *(["ifgsm20_8_normalized"] if len(study.units) > 1 else [])):
        found = _measured(study, name)
        if found:
            sentences.append(f"Under {spoken(name)} it is {_numbers(study, found)} %.")
            compared.append((f"under {spoken(name)}", found))
    for axis in ("horizontal", "vertical"):
        flips = [(group, estimate) for group in study.groups if (estimate := group.flips(axis)) is not None]
        if flips:
            sentences.append(f"Along a {axis} translation the label flips {_numbers(study, flips, 2)} times.")
            compared.append((f"in {axis} label flips", flips))
    return sentences, compared


def _against_none(study: StudyRecord, measures: Sequence[Measure]) -> list[str]:
    """Whether penalties help under attack at all, in pixel units: the usual meaning of 8/255."""
    for words, found in measures:
        plain = next((estimate for group, estimate in found if group.kind == "none"), None)
        others = [(label(study, group), estimate) for group, estimate in found if group.kind != "none"]
        if not words.endswith("pixel units") or plain is None or not others:
            continue
        better = [title for title, estimate in others if estimate.clear_of(plain) and estimate.mean < plain.mean]
        if not better:
            return [f"None of the penalties lowers the error {words} {_beyond(found)}."]
        lower = f"{listed(better)} lower{'s' * (len(better) == 1)}"
        return [f"Compared with no penalty, {lower} the error {words} {_beyond(found)}."]
    return []


def _comparison(study: StudyRecord, measures: Sequence[Measure]) -> list[str]:
    """Whether Wasserstein and Euclidean differ: the paper's question. Of several strengths, the first of each."""
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
            straight, moved = pair[0][1], pair[1][1]  # groups are in the paper's order
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
    """What a significant difference goes beyond: with one seed, the test does not cover the randomness of training."""
    return "beyond chance" if all(estimate.seeds > 1 for _, estimate in found) else "beyond the choice of test images"


def _masking(study: StudyRecord) -> str:
    verdicts = [run.evaluation["verdict"] for run in study.runs if "verdict" in run.evaluation]
    if not verdicts:
        return ""
    masked, unmasked = sum(v.startswith("masked") for v in verdicts), sum(v == UNMASKED for v in verdicts)
    if not masked and not unmasked:
        return f"The checks for gradient masking say nothing about {counted(len(verdicts), 'evaluated run')}."
    if not masked and unmasked < len(verdicts):  # too few images, or a network that learned nothing
        found = f"The checks found no sign of gradient masking in {unmasked} of {len(verdicts)} evaluated runs"
        return f"{found}; of the others they say nothing."
    if not masked:
        where = f" in any of the {len(verdicts)} evaluated runs" if len(verdicts) > 1 else ""
        return f"The checks found no sign of gradient masking{where}."
    return (
        f"{masked} of {len(verdicts)} evaluated runs show signs of gradient masking, so their errors under attack are too low."
    )


def _learned_nothing(study: StudyRecord) -> str:
    """A warning about networks that guess: they look stable, since nothing changes a constant answer."""
    guessing = [run.name for run in study.runs if _guesses(run)]
    if not guessing or len(study.runs) == 1:  # the words of a single run say it
        return ""
    more = [f"{len(guessing) - MOST_NAMES} more"] if len(guessing) > MOST_NAMES else []
    which = f"{len(guessing)} of {len(study.runs)} networks ({listed(guessing[:MOST_NAMES] + more)})"
    return f"{LEARNED_NOTHING}: {which}, which makes means and intervals meaningless for them."


def _guesses(run: RunRecord) -> bool:
    told: str | None = run.evaluation.get("summary")
    return told.startswith(LEARNED_NOTHING) if told else (run.error("clean") or 0.0) >= GUESSING


def _caveat(study: StudyRecord) -> str:
    if study.groups and max(len(group.runs) for group in study.groups) == 1:
        return "There is one seed for each setting: the intervals cover the choice of test images, not the luck of training."
    if study.groups and min(len(group.runs) for group in study.groups) < 3:
        return "With two seeds or fewer, t-intervals are very wide; more seeds would say more."
    return ""


def _measured(study: StudyRecord, name: str) -> list[tuple[Group, Estimate]]:
    return [(group, estimate) for group in study.groups if (estimate := group.error(name)) is not None]


def _numbers(study: StudyRecord, found: Sequence[tuple[Group, Estimate]], digits: int = 1) -> str:
    return listed([f"{estimate.mean:.{digits}f} ({label(study, group)})" for group, estimate in found])


def label(study: StudyRecord, group: Group) -> str:
    """A group in a sentence: its title, with its strength if another group has the same title."""
    title = "none" if group.kind == "none" else group.title
    return f"{title}, {group.detail}" if study.has_another(group) and group.detail else title


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _attacked(groups: list[Group]) -> tuple[str, Callable[[Group], Estimate | None]]:
    """The question about attacks that can be answered for most groups, and its answer for one."""
    point = next(iter(headline(next((curve for group in groups if (curve := group.curve())), ()))), None)
    if point is not None:
        ball = (point.epsilon, point.units, point.norm)

        def within(group: Group) -> Estimate | None:
            same = [p for p in group.curve() if (p.epsilon, p.units, p.norm) == ball]
            return Estimate(same[0].error, same[0].low, same[0].high, len(group.runs)) if same else None

        return attacked_question(point), within
    name = next((key for key in HEADLINE if any(group.error(key) is not None for group in groups)), HEADLINE[-1])
    return f"Error under {spoken(name)}", lambda group: group.error(name)


def _guessing(group: Group) -> float:
    """The error of guessing, at which a number is a warning; unknown in files of earlier versions."""
    return error_of_guessing(next((classes for run in group.runs if (classes := run.evaluation.get("classes"))), None))


def _number(study: StudyRecord, group: Group, estimate: Estimate | None, limit: float) -> AnswerRow:
    if estimate is None:
        return AnswerRow("unknown", label=label(study, group), series=group.series)
    known = estimate.low is not None and estimate.high is not None and estimate.low < estimate.high
    note = f"{estimate.low:.1f} to {estimate.high:.1f}" if known else ""
    highest = estimate.mean if estimate.high is None else estimate.high
    return AnswerRow(f"{estimate.mean:.1f} %", note, label(study, group), group.series, bad=highest >= limit)


def _trust(study: StudyRecord, group: Group) -> AnswerRow:
    """The verdict on a group: the worst of its seeds, and how many have it."""
    verdicts = [run.evaluation["verdict"] for run in group.runs if "verdict" in run.evaluation]
    if not verdicts:
        return AnswerRow("unknown", "not checked", label(study, group), group.series, bad=True)
    found = [trust(verdict) for verdict in verdicts]
    worst = next((row for row in found if row.bad), found[0])
    share = f", {sum(row.bad for row in found)} of {len(found)} seeds" if worst.bad and len(found) > 1 else ""
    return AnswerRow(worst.value, (worst.note + share) if worst.bad else "", label(study, group), group.series, worst.bad)
