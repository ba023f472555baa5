"""The tables and the paragraph of a report: the paper's numbers, both units, and honest words."""

import json
import re
from pathlib import Path

import pytest

from tests.study.fake_runs import PAPERS, fake_study
from wassersmooth.robustness.report import LEARNED_NOTHING
from wassersmooth.study.estimates import Estimate
from wassersmooth.study.measures import full_title
from wassersmooth.study.report import tables
from wassersmooth.study.report.page import sections_of, templates, write_report
from wassersmooth.study.report.reading import read_study
from wassersmooth.study.report.summary import mismatch_warning, subtitle, summary
from wassersmooth.study.report.tables import (
    beyond_table,
    cost_table,
    errors_table,
    flips_table,
    provenance_table,
)
from wassersmooth.study.tables import Cell, Table, TableRow, cells

PAPER_TABLE_1 = ["16.29", "15.61", "15.35", "82.22", "31.10", "30.20", "89.72", "66.83", "44.32", "90.15", "40.06", "32.12"]
PAPER_TABLE_2 = ["10.009", "7.898", "6.488", "9.920", "9.437", "7.956"]


def set_errors(folder: Path, errors: dict[str, list[float]], name: str = "clean") -> None:
    """Overwrites one error: by regularizer, a number for each seed."""
    for point, values in errors.items():
        for seed, value in enumerate(values):
            path = next(folder.glob(f"{point}*-seed{seed}")) / "evaluation.json"
            record = json.loads(path.read_text())
            record["errors"][name] = value
            path.write_text(json.dumps(record))


def test_table_1_has_both_units_beside_the_papers_numbers(tmp_path: Path) -> None:
    table = errors_table(read_study(fake_study(tmp_path / "s", seeds=2, pictures=False, **PAPERS)))
    assert table is not None
    labels = [row.label.replace("\u00a0", " ") for row in table.rows]
    attacks = ["FGSM ε = 8/255", "FGSM ε = 25/255", "I-FGSM-20 ε = 8/255"]
    assert labels == ["Natural", "ε in pixel units", *attacks, "ε in normalized units", *attacks]
    printed = [[cell.paper for cell in row.cells] for row in table.rows if row.cells]
    flat = [number for row in printed for number in row]
    assert flat == PAPER_TABLE_1[:3] + PAPER_TABLE_1[3:] * 2
    assert "about 2.4/255 in pixels" in table.caption, "0.3 is the std of the made-up runs"


def test_table_2_stands_beside_the_papers_numbers(tmp_path: Path) -> None:
    table = flips_table(read_study(fake_study(tmp_path / "s", seeds=2, pictures=False, **PAPERS)))
    assert table is not None
    assert [cell.paper for row in table.rows for cell in row.cells] == PAPER_TABLE_2
    assert "\u22128 to +8" in table.caption


def test_without_normalized_units_that_half_is_absent(tmp_path: Path) -> None:
    table = errors_table(read_study(fake_study(tmp_path / "s", seeds=2, normalized=False, pictures=False)))
    assert table is not None
    assert "ε in normalized units" not in [row.label for row in table.rows]


def test_a_suite_without_normalized_units_says_nothing_of_them(tmp_path: Path) -> None:
    """The networks normalize their images, but only attacks in pixels were run."""
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    before = errors_table(read_study(folder))
    for path in folder.glob("*/evaluation.json"):
        record = json.loads(path.read_text())
        record["errors"] = {name: value for name, value in record["errors"].items() if "normalized" not in name}
        record["entries"] = [entry for entry in record["entries"] if "normalized" not in entry["name"]]
        path.write_text(json.dumps(record))
    after = errors_table(read_study(folder))
    assert before is not None
    assert after is not None
    assert "after normalization" in before.caption
    assert "after normalization" not in after.caption


def test_values_are_means_with_t_intervals_and_single_seeds_have_wilsons(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "many", seeds=3, pictures=False)
    set_errors(folder, {"none": [5.0, 6.0, 7.0]})
    table = errors_table(read_study(folder))
    assert table is not None
    # t(2 degrees of freedom) = 4.303, spread 1: half the interval is 4.303 / sqrt(3) = 2.484
    assert table.rows[0].cells[0] == Cell("6.0", "3.5\u20138.5")

    folder = fake_study(tmp_path / "one", seeds=1, pictures=False)
    path = next(folder.glob("none*")) / "evaluation.json"
    record = json.loads(path.read_text())
    record["errors"]["clean"] = 10.0
    del record["intervals"]  # then Wilson's from the number of images: 40 wrong of 400
    path.write_text(json.dumps(record))
    table = errors_table(read_study(folder))
    assert table is not None
    assert table.rows[0].cells[0] == Cell("10.0", "7.4\u201313.3")


def test_only_a_clear_winner_is_bold() -> None:
    clear = cells([Estimate(30.0, 28.0, 32.0, 1), Estimate(10.0, 8.0, 12.0, 1), None])
    assert [cell.best for cell in clear] == [False, True, False]
    assert not any(cell.best for cell in cells([Estimate(11.0, 8.0, 12.0, 1), Estimate(10.0, 8.0, 12.0, 1)]))
    assert not any(cell.best for cell in cells([Estimate(10.0, 8.0, 12.0, 1)])), "alone is not a victory"


def test_other_errors_are_listed_in_words(tmp_path: Path) -> None:
    table = beyond_table(read_study(fake_study(tmp_path / "s", seeds=1, pictures=False)))
    assert table is not None
    titles = [row.label.replace("\u00a0", " ") for row in table.rows]
    assert titles[0] == "PGD-20, margin loss, ε = 8/255, pixel units"
    assert titles[1] == "PGD-20, L2 norm ε = 0.5, pixel units"
    assert full_title("something_new") == "something new"


def test_cost_is_relative_to_none(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    for point, seconds in (("none", 2.0), ("euclidean", 5.0), ("wasserstein", 6.0)):
        epochs = [json.dumps({"epoch": epoch, "loss": 1.0, "seconds": seconds / 2}) for epoch in (1, 2)]
        (next(folder.glob(f"{point}*")) / "metrics.jsonl").write_text("\n".join(epochs))
    table = cost_table(read_study(folder))
    assert table is not None
    shown = [[cell.value for cell in row.cells] for row in table.rows]
    assert shown == [
        ["2.0", "1.00", "1.00 \u00d7", "1"],
        ["5.0", "2.50", "2.50 \u00d7", "1"],
        ["6.0", "3.00", "3.00 \u00d7", "1"],
    ]


def test_the_summary_says_what_the_numbers_say(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=3, pictures=False)
    for name in ("clean", "pgd20_margin_8_pixel", "ifgsm20_8_normalized"):
        set_errors(folder, {"none": [50.0, 51, 52], "euclidean": [30.0, 31, 32], "wasserstein": [20.0, 21, 22]}, name)
    lead, detail = summary(read_study(folder))
    assert lead.startswith("9 networks were trained on digits, with no penalty, Euclidean (η = 0.2) and Wasserstein")
    assert (
        "Wasserstein penalty is better than the Euclidean one beyond chance on clean images, under 20 margin-loss PGD" in lead
    )
    assert (
        "Compared with no penalty, Euclidean and Wasserstein lower the error under 20 margin-loss PGD steps at 8/255 in pixel "
        "units beyond chance." in lead
    )
    assert "The error on clean test images is 51.0 (none), 31.0 (Euclidean) and 21.0 (Wasserstein) %." in detail
    assert subtitle(read_study(folder)) == "digits · small · 12 epochs · 3 seeds"
    one = fake_study(tmp_path / "one", seeds=1, pictures=False, epochs=1)
    assert subtitle(read_study(one)) == "digits · small · 1 epoch · 1 seed"

    for name in ("clean", "pgd20_margin_8_pixel", "ifgsm20_8_normalized"):
        set_errors(folder, {"wasserstein": [29.0, 31, 34]}, name)
    lead, _ = summary(read_study(folder))
    assert "better than the Euclidean one beyond chance on clean" not in lead
    assert "cannot be told apart on clean images" in lead


def test_the_summary_compares_flips_along_both_axes(tmp_path: Path) -> None:
    """What table 2 prints in bold, the lead must not deny."""
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    same = {"none": [50.0], "euclidean": [40.0], "wasserstein": [40.0]}
    for path in folder.glob("*/evaluation.json"):
        record = json.loads(path.read_text())
        vertical = 3.0 if path.parent.name.startswith("wasserstein") else 4.0
        record |= {"flips": {"horizontal": 3.0, "vertical": vertical}, "intervals": {"flips_horizontal": [2.8, 3.2]}}
        record["intervals"]["flips_vertical"] = [vertical - 0.2, vertical + 0.2]
        path.write_text(json.dumps(record))
    for name in ("clean", "pgd20_margin_8_pixel", "ifgsm20_8_normalized"):
        set_errors(folder, same, name)
    study = read_study(folder)
    table = flips_table(study)
    assert table is not None
    assert [cell.best for cell in table.rows[1].cells] == [False, False, True]
    lead, detail = summary(study)
    better = (
        "The Wasserstein penalty is better than the Euclidean one beyond the choice of test images in vertical label flips."
    )
    assert better in lead
    assert "cannot be told apart on clean images, " in lead
    assert lead.endswith("and in horizontal label flips.")
    assert "Along a vertical translation the label flips 4.00 (none), 4.00 (Euclidean) and 3.00 (Wasserstein) times." in detail


def test_settings_that_a_run_does_not_store_have_their_usual_values(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    changes = {
        "euclidean": {"regularizer": "deformation", "eta": 1.0, "smoothness": 2.0, "elastic": 1.5, "patience_on": "clean"},
        "wasserstein": {"regularizer": "own", "eta": 1.0, "radius": 0, "factory": "mine:metric"},
    }
    for path in folder.glob("*/config.json"):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | changes.get(stored["regularizer"], {})))
    plain, *others = (group.detail for group in read_study(folder).groups)
    assert plain == "elastic 0.0"
    assert others == ["η = 1, smoothness 2, elastic 1.5", "η = 1, mine:metric, elastic 0.0"]


def test_where_nothing_differs_the_summary_names_what_was_compared(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    for path in folder.glob("*/evaluation.json"):
        record = json.loads(path.read_text())
        record |= {"flips": {}, "intervals": {}}
        path.write_text(json.dumps(record))
    for name in ("clean", "pgd20_margin_8_pixel", "ifgsm20_8_normalized"):
        set_errors(folder, {"none": [50.0], "euclidean": [50.0], "wasserstein": [50.0]}, name)
    assert summary(read_study(folder))[0].endswith(
        "The Wasserstein penalty cannot be told from the Euclidean one beyond the choice of test images, be it on clean "
        "images, under 20 margin-loss PGD steps at 8/255 in pixel units or under I-FGSM-20 at 8/255 in normalized units."
    )


def test_two_strengths_of_one_kind_are_told_apart(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    more = fake_study(tmp_path / "more", seeds=1, pictures=False)
    strong = next(more.glob("euclidean*")).rename(folder / "stronger")
    config = json.loads((strong / "config.json").read_text())
    (strong / "config.json").write_text(json.dumps(config | {"eta": 0.7}))
    set_errors(folder, {"none": [9.0], "euclidean": [3.0], "wasserstein": [1.0]})
    record = json.loads((strong / "evaluation.json").read_text())
    record["errors"]["clean"] = 6.0
    (strong / "evaluation.json").write_text(json.dumps(record))
    lead, detail = summary(read_study(folder))
    assert "9.0 (none), 3.0 (Euclidean, η = 0.2), 6.0 (Euclidean, η = 0.7) and 1.0 (Wasserstein) %" in detail
    assert "than the Euclidean one (η = 0.2)" in lead or "from the Euclidean one (η = 0.2)" in lead
    assert "Wasserstein penalty (" not in lead, "there is one Wasserstein alone"
    assert lead.endswith("Other strengths of a penalty are in the tables, and not compared here.")


def test_titles_are_written_as_people_write_them(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    kinds = {"none": "pgd7", "euclidean": "wasserstein+l2-adversarial", "wasserstein": "dual-norm"}
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"regularizer": kinds[config["regularizer"]]}))
    titles = {group.title for group in read_study(folder).groups}
    assert titles == {"PGD-7 training", "Wasserstein + L2 one-step training", "Dual norm"}


def test_runs_that_were_measured_on_other_images_are_named(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    assert mismatch_warning(read_study(folder)) == ""
    table = errors_table(read_study(folder))
    assert table is not None
    assert table.caption.startswith("Error on 400 test images in percent")
    path = next(folder.glob("none*")) / "evaluation.json"
    record = json.loads(path.read_text())
    for entry in record["entries"]:
        entry["images"] = 200
    path.write_text(json.dumps(record | {"suite": "quick"}))
    study = read_study(folder)
    assert mismatch_warning(study) == (
        "Not all runs were measured alike: none-seed0 (suite quick, 200 test images); the others: suite standard, 400 test "
        "images; their errors do not compare; to measure all alike: wassersmooth evaluate FOLDER --suite standard"
    )
    table = errors_table(study)
    assert table is not None
    assert table.caption.startswith("Error on 200 or 400 test images in percent")

    for entry in record["entries"]:
        entry["images"] = 400
    path.write_text(json.dumps(record | {"suite": "quick"}))
    assert "rows that only one suite has are blank" in mismatch_warning(read_study(folder)), "the images are the same"
    path.write_text(json.dumps(record | {"test_sha256": "others"}))
    line = mismatch_warning(read_study(folder))
    assert "none-seed0 (suite standard, 400 other test images)" in line
    assert line.endswith("--suite standard --test-images 400")


def test_one_thread_is_one(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    path = next(folder.glob("none*")) / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 1}))
    table = provenance_table(read_study(folder))
    assert table is not None
    assert [row.cells[2].value.split(", ")[1] for row in table.rows] == ["1 thread", "2 threads", "2 threads"]


@pytest.mark.parametrize(("seeds", "words"), [(1, "one seed for each setting"), (2, "t-intervals are very wide")])
def test_the_summary_warns_about_few_seeds(tmp_path: Path, seeds: int, words: str) -> None:
    assert words in summary(read_study(fake_study(tmp_path / "s", seeds=seeds, pictures=False)))[1]


def test_the_summary_begins_with_networks_that_learned_nothing(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=2, pictures=False)
    assert "earned nothing" not in "".join(summary(read_study(folder)))
    set_errors(folder, {"euclidean": [90.0, 3.0], "none": [81.0, 3.0]})
    assert "earned nothing" not in "".join(summary(read_study(folder))), "a hundred classes may have such errors"
    for name, told in {"euclidean": "Learned nothing: it gives one answer for all images.", "none": None}.items():
        path = next(folder.glob(f"{name}*-seed0")) / "evaluation.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"summary": told}))  # the second is by an earlier version
    lead = summary(read_study(folder))[0]
    assert re.match(r"Learned nothing: 2 of 6 networks \(none-seed0 and euclidean-eta\S*-seed0\), which makes means", lead)


def test_the_summary_counts_masked_runs(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    for path in folder.glob("*/evaluation.json"):
        verdict = "masked: x" if path.parent.name.startswith("none") else "no sign of masking"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"verdict": verdict}))
    assert "1 of 3 evaluated runs show signs of gradient masking" in summary(read_study(folder))[1]
    for path in folder.glob("none*/evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"verdict": LEARNED_NOTHING}))
    expected = "The checks found no sign of gradient masking in 2 of 3 evaluated runs; of the others they say nothing."
    assert expected in summary(read_study(folder))[1]
    for path in folder.glob("*/evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"verdict": LEARNED_NOTHING}))
    assert "The checks for gradient masking say nothing about 3 evaluated runs." in summary(read_study(folder))[1]


def test_markdown_and_latex_have_the_same_numbers_in_columns_of_equal_length(tmp_path: Path) -> None:
    sections, absent = sections_of(read_study(fake_study(tmp_path / "s", seeds=2, pictures=False)))
    assert not absent
    for table in (part for section in sections for part in section.parts if isinstance(part, Table)):
        lines = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1, table.name
        body = [line for line in table.to_latex().splitlines() if line.endswith("\\\\") and "multicolumn" not in line]
        assert len({line.replace("\\&", "").count("&") for line in body}) == 1, table.name
        heading = table.title.removeprefix("Table 1. ").removeprefix("Table 2. ")
        assert rf"\caption{{\textbf{{{heading}}} " in table.to_latex(), "LaTeX numbers by itself"
        for row in table.rows:
            for cell in row.cells:
                assert cell.value.replace("_", "\\_").replace("*", "\\*") in table.to_markdown()


def test_a_table_that_cannot_be_made_costs_no_other_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_study(tmp_path / "s", pictures=False)
    monkeypatch.setattr(tables, "_reach", lambda study: {}["reach"])
    assert "Translations: a part could not be made from what the runs hold" in write_report(folder).read_text()
    for name in ("tables.md", "tables.tex"):
        text = (folder / name).read_text()
        assert "Clean and adversarial error" in text
        assert "Label flips" not in text
        assert text.index("Clean and adversarial") < text.index("Further measures") < text.index("Provenance")


def test_text_cannot_break_out_of_a_table() -> None:
    nasty = "<script>alert(1)</script> | a & b \\ $x$ 5% _x_ {y} #1 ~ ^"
    table = Table("name", nasty, nasty, ((nasty, nasty),), (TableRow(nasty, (Cell(nasty, nasty, nasty),), nasty),), nasty)
    page = templates().get_template("table.html").render(part=table)
    assert "&lt;script" in page
    assert "<script" not in page + table.to_markdown()
    data = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
    assert len({line.replace("\\\\", "").replace("\\|", "").count("|") for line in data}) == 1
    latex = table.to_latex()
    for character in "&%$#_{}":
        assert f"\\{character}" in latex
    assert r"\textbackslash{} \$x\$ 5\% \_x\_ \{y\} \#1 \textasciitilde{} \textasciicircum{}" in latex
