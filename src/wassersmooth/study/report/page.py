"""The report page, section by section. A section without anything to show is left out and named at the end."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wassersmooth.study.figures import Figure
from wassersmooth.study.report import curves, pictures, tables
from wassersmooth.study.report.data import Study
from wassersmooth.study.report.style import STYLE
from wassersmooth.study.report.summary import not_alike, subtitle, summary
from wassersmooth.study.tables import Table, unbroken

# Nothing is fetched and nothing is run: a browser refuses it even if something slipped through the escaping.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that says why to look, and what there is to see."""

    name: str
    title: str
    text: str
    parts: tuple[Figure | Table, ...]
    folded: bool = False

    def to_html(self) -> str:
        body = "\n".join(part.to_html() for part in self.parts)
        body = f"<details><summary>Show</summary>\n{body}\n</details>" if self.folded else body
        text = f"<p>{html.escape(self.text)}</p>\n" if self.text else ""
        head = f'<h2 id="{self.name}-title">{html.escape(self.title)}</h2>'
        return f'<section id="{self.name}" aria-labelledby="{self.name}-title">\n{head}\n{text}{body}\n</section>'


Maker = Callable[[Study], Figure | Table | None]
CONTENTS: tuple[tuple[str, str, str, tuple[Maker, ...]], ...] = (
    (
        "errors",
        "Clean and adversarial error",
        "The paper's first question: does smoothness along Wasserstein directions protect against attacks?",
        (curves.glance, tables.errors_table),
    ),
    (
        "translations",
        "Translations",
        "Its second question: does a label stay when the picture merely moves?",
        (tables.flips_table, pictures.strips),
    ),
    ("epsilon", "Error against epsilon", "", (curves.epsilon_curves,)),
    ("beyond", "Beyond the paper", "", (tables.beyond_table,)),
    ("masking", "Can the attacks be trusted?", "", (tables.masking_table,)),
    ("perturbed", "What an attack looks like", "", (pictures.perturbations,)),
    ("geometry", "Why Wasserstein", "", (pictures.neighborhoods,)),
    ("learning", "Training", "", (curves.training_curves,)),
    ("cost", "Cost", "", (tables.cost_table,)),
    ("provenance", "Provenance", "", (tables.provenance_table,)),
)


def page(study: Study) -> str:
    """The whole document."""
    sections, absent = _sections(study)
    links = "".join(f'<a href="#{section.name}">{html.escape(section.title)}</a>' for section in sections)
    title = html.escape(study.name)
    lead, detail = map(unbroken, summary(study))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}: Wasserstein smoothness</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header>\n<p class="kicker">Wasserstein smoothness</p>\n<h1>{title}</h1>\n'
        f'<p class="sub">{html.escape(subtitle(study))}</p>\n'
        f'<p class="lead">{html.escape(lead)}</p>\n<p class="detail">{html.escape(detail)}</p>\n'
        f"{_warning(not_alike(study))}{_complaints(study.complaints)}</header>\n"
        f'<nav aria-label="Sections">{links}</nav>\n<main>\n'
        + "\n".join(section.to_html() for section in sections)
        + "\n</main>\n"
        f"{_footer(absent, _notes(study))}\n</body>\n</html>\n"
    )


def _sections(study: Study) -> tuple[list[Section], list[str]]:
    """The sections that have something to show, and a line for each that has not."""
    sections, absent = [], []
    for name, title, text, makers in CONTENTS if study.groups else ():
        parts = []
        for make in makers:
            try:
                parts.append(make(study))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as broken:
                # The files were readable, but what is in them is not what this version writes: one part lost, not the page.
                absent.append(f"{title}: a part could not be made from what the runs hold ({type(broken).__name__}: {broken}).")
        found = tuple(part for part in parts if part is not None)
        if found:
            sections.append(Section(name, title, text, found, folded=name == "provenance"))
        else:
            absent.append(f"{title}: left out for lack of data.")
    return sections, absent


def _warning(line: str) -> str:
    return f'<div class="complaints" role="note"><p>{html.escape(line)}</p></div>\n' if line else ""


def _complaints(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    count = f"{len(lines)} file{'s' * (len(lines) != 1)} could not be read"
    return f'<div class="complaints" role="note"><p>{count}</p><ul>{items}</ul></div>\n'


def _notes(study: Study) -> list[str]:
    """What the exhibits say about what they lack, each thing once."""
    notes = [note for run in study.runs if run.exhibits is not None for note in run.exhibits.notes]
    return list(dict.fromkeys(notes))


def _footer(absent: Sequence[str], notes: Sequence[str]) -> str:
    lines = [*absent, *notes, "Made by wassersmooth from the run folders of this study alone."]
    return f"<footer>{''.join(f'<p>{html.escape(line)}</p>' for line in lines)}</footer>"
