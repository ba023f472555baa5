"""The report of a study: ``report.html``, ``tables.md`` and ``tables.tex``, made from the run folders alone.

What the page looks like stands in ``templates/``; a section without anything to show is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment

from wassersmooth.robustness.page import templates as shared_templates
from wassersmooth.study import durable
from wassersmooth.study.figures import Figure
from wassersmooth.study.report import charts, pictures, tables
from wassersmooth.study.report.data import StudyRecord
from wassersmooth.study.report.reading import read_study
from wassersmooth.study.report.summary import answers, mismatch_warning, subtitle, summary
from wassersmooth.study.tables import Table, escape_markdown, unbroken


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that says why to look, and what there is to see."""

    name: str
    title: str
    text: str
    parts: tuple[Figure | Table, ...]
    folded: bool = False


Maker = Callable[[StudyRecord], Figure | Table | None]
CONTENTS: tuple[tuple[str, str, str, tuple[Maker, ...]], ...] = (
    ("epsilon", "Error against epsilon", "", (charts.error_curves,)),
    ("errors", "Clean and adversarial error", "", (charts.glance, tables.errors_table)),
    ("beyond", "Further attacks, noise and deformations", "", (tables.beyond_table,)),
    (
        "translations",
        "Translations",
        "Does a label stay when the picture merely moves?",
        (tables.flips_table, pictures.strips),
    ),
    ("masking", "Can the attacks be trusted?", "", (tables.masking_table,)),
    ("certified", "What is certain", "", (charts.certified_curves,)),
    ("perturbed", "What an attack looks like", "", (pictures.perturbations,)),
    ("attacks", "Single attacks against epsilon", "", (charts.epsilon_curves,)),
    ("geometry", "Why Wasserstein", "", (pictures.neighborhoods,)),
    ("learning", "Training", "", (charts.training_curves,)),
    ("cost", "Cost", "", (tables.cost_table,)),
    ("provenance", "Provenance", "", (tables.provenance_table,)),
)


@cache
def templates() -> Environment:
    """The templates of this package, and those that it shares with the page of a single model."""
    found = shared_templates("wassersmooth.study.report")
    found.filters["unbroken"] = unbroken
    return found


def write_report(study_folder: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Write the report into the study folder and return the path of its page. Reads files only, and runs no model.

    If some runs were measured differently, ``say`` gets one line about it.

    A file of a run that is missing or broken costs one line in the report; a folder without runs is a ValueError. Readers find
    the old files or the new ones, never half of one.
    """
    folder = Path(study_folder)
    study = read_study(folder)
    if line := mismatch_warning(study):
        say(line.replace("evaluate FOLDER", f"evaluate {folder}"))
    sections, absent = sections_of(study)
    found = [part for section in sections for part in section.parts if isinstance(part, Table)]
    found.sort(key=lambda table: table.name)
    # All three are made before the first is replaced, since they belong together.
    made = {"tables.md": _markdown(study, found), "tables.tex": _latex(found), "report.html": _page(study, sections, absent)}
    for name, text in made.items():
        durable.write_text(folder / name, text)
    return folder / "report.html"


def _page(study: StudyRecord, sections: list[Section], absent: list[str]) -> str:
    """The whole document, in one file."""
    lead, detail = summary(study)
    notes = dict.fromkeys(note for run in study.runs if run.pictures is not None for note in run.pictures.notes)
    return (
        templates()
        .get_template("report.html")
        .render(
            study=study,
            subtitle=subtitle(study),
            answers=answers(study),
            lead=lead,
            detail="" if any(section.name == "errors" for section in sections) else detail,
            warning=mismatch_warning(study),
            sections=sections,
            footer=[*absent, *notes, "Made by wassersmooth from the run folders of this study alone."],
        )
    )


def sections_of(study: StudyRecord) -> tuple[list[Section], list[str]]:
    """The sections with content, and a line for each part that could not be made."""
    sections, absent = [], []
    _, detail = summary(study)
    for name, title, text, makers in CONTENTS if study.groups else ():
        parts = []
        for make in makers:
            try:
                parts.append(make(study))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as broken:
                # The files could be read, but hold something that this version does not write: one part is lost, not the page.
                absent.append(f"{title}: a part could not be made from what the runs hold ({type(broken).__name__}: {broken}).")
        found = tuple(part for part in parts if part is not None)
        if found:
            sections.append(Section(name, title, detail if name == "errors" else text, found, folded=name == "provenance"))
    return sections, absent


def _markdown(study: StudyRecord, found: Sequence[Table]) -> str:
    parts = [
        f"# {escape_markdown(study.name)}\n",
        *(f"{escape_markdown(text)}\n" for text in (subtitle(study), *summary(study), mismatch_warning(study)) if text),
    ]
    return "\n".join(parts + [table.to_markdown() for table in found])


def _latex(found: Sequence[Table]) -> str:
    head = "% Tables of a wassersmooth study; needs \\usepackage{booktabs}.\n"
    return "\n".join([head, *(table.to_latex() for table in found)])
