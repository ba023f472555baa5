"""The report of a study: ``report.html``, ``tables.md`` and ``tables.tex``, made from the run folders alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wassersmooth.study import durable
from wassersmooth.study.report.data import StudyRecord
from wassersmooth.study.report.page import page
from wassersmooth.study.report.reading import read_study
from wassersmooth.study.report.summary import mismatch_warning, subtitle, summary
from wassersmooth.study.report.tables import all_tables
from wassersmooth.study.tables import escape_markdown as escape


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
    # All three are made before the first is replaced, since they belong together.
    made = {"tables.md": _markdown(study), "tables.tex": _latex(study), "report.html": page(study)}
    for name, text in made.items():
        durable.write_text(folder / name, text)
    return folder / "report.html"


def _markdown(study: StudyRecord) -> str:
    parts = [
        f"# {escape(study.name)}\n",
        *(f"{escape(text)}\n" for text in (subtitle(study), *summary(study), mismatch_warning(study)) if text),
    ]
    return "\n".join(parts + [table.to_markdown() for table in all_tables(study)])


def _latex(study: StudyRecord) -> str:
    head = "% Tables of a wassersmooth study; needs \\usepackage{booktabs}.\n"
    return "\n".join([head, *(table.to_latex() for table in all_tables(study))])
