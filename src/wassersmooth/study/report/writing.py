"""The report of a study: ``report.html``, ``tables.md`` and ``tables.tex``, made from the run folders alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wassersmooth.study import durable
from wassersmooth.study.report.data import Study
from wassersmooth.study.report.page import page
from wassersmooth.study.report.reading import read_study
from wassersmooth.study.report.summary import not_alike, subtitle, summary
from wassersmooth.study.report.tables import all_tables
from wassersmooth.study.tables import escape_markdown as escape


def write_report(study_folder: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Writes the report into the study folder and returns the path of its page. Never trains, never asks a model.

    What a reader must know before comparing runs is also said, in one line, by ``say``.

    Each file is written aside and renamed, so a reader finds the old report or the new one. A file of a run that is missing
    or broken costs one line in the report; a folder without runs is a ValueError. Charts need the extra ``plots``.
    """
    folder = Path(study_folder)
    study = read_study(folder)
    if line := not_alike(study):
        say(line.replace("evaluate FOLDER", f"evaluate {folder}"))
    # All three are made before the first is replaced: they belong together.
    made = {"tables.md": _markdown(study), "tables.tex": _latex(study), "report.html": page(study)}
    for name, text in made.items():
        durable.write(folder / name, text.encode())
    return folder / "report.html"


def _markdown(study: Study) -> str:
    parts = [
        f"# {escape(study.name)}\n",
        *(f"{escape(text)}\n" for text in (subtitle(study), *summary(study), not_alike(study)) if text),
    ]
    return "\n".join(parts + [table.to_markdown() for table in all_tables(study)])


def _latex(study: Study) -> str:
    head = "% Tables of a wassersmooth study; needs \\usepackage{booktabs}.\n"
    return "\n".join([head, *(table.to_latex() for table in all_tables(study))])
