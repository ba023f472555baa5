"""What the page of a study says first: clean error, error under attack, and whether the attacks can be trusted."""

from __future__ import annotations

from collections.abc import Callable

from wassersmooth.robustness.page import Answer, AnswerRow, attacked_question, trust
from wassersmooth.robustness.summary import error_of_guessing, headline
from wassersmooth.study.estimates import Estimate
from wassersmooth.study.measures import spoken
from wassersmooth.study.report.data import Group, StudyRecord
from wassersmooth.study.report.summary import HEADLINE, label


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
