"""The page of a report: one file, the summary and three answers first, text escaped, packages named where they are missing."""

import dataclasses
import html
import re
import sys

import pytest

from tests.robustness.small_models import digits, trained
from wassersmooth._checks import MissingExtraError
from wassersmooth.robustness import page as pages
from wassersmooth.robustness.attacks import FGSM, PGD
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.findings import Finding


@pytest.fixture(scope="module")
def report():
    _, _, images, labels = digits()
    return evaluate(trained(), images[:40], labels[:40], [FGSM(n / 255) for n in (2, 8, 25)], seed=0)


@pytest.mark.slow
def test_the_summary_and_three_answers_come_first(report):
    page = report.to_html("my network")
    assert report.summary in page
    assert re.findall(r'<section class="answer"><h2>(.*?)</h2>', page) == [
        "Clean error",
        "Error under attack, 8/255",
        "Can the attacks be trusted?",
    ]
    attacked = next(point for point in report.curve if round(255 * point.epsilon) == 8)
    assert f"<b>{attacked.error:.1f} %</b>" in page
    assert "<b>yes</b>" in page
    order = [page.index(mark) for mark in (report.summary, 'class="answers"', 'id="error-curve"', 'id="errors"')]
    assert order == sorted(order)
    with pytest.raises(ValueError, match="title must be text; got NoneType; leave it out"):
        report.to_html(None)
    assert page.count("<svg role") == 1, "one plot"


def test_every_number_of_the_report_is_on_the_page(report):
    page = report.to_html()
    for entry in (*report.entries, *report.probes):
        assert f"{entry.low:.1f}\u2013{entry.high:.1f}" in page
    for flips in report.translations:
        assert f"{flips.mean:.2f}<small>" in page
    assert f"Verdict: {report.verdict}." in page


@pytest.mark.parametrize(("classes", "bad"), [(2, True), (10, False)])
def test_a_network_that_is_not_robust_is_marked(report, classes, bad):
    """As many errors as guessing makes: half of two classes."""
    points = tuple(dataclasses.replace(point, error=50.0, low=40.0, high=60.0) for point in report.curve)
    found = dataclasses.replace(report, curve=points, classes=classes)
    assert found.summary.startswith("Not robust") == bad
    guesses = dataclasses.replace(report.entries[0], error=45.0, high=55.0)
    clean = pages.answers(dataclasses.replace(found, entries=(guesses, *report.entries[1:])))[0].rows[0]
    assert clean.bad == bad
    assert ('<b class="bad">50.0 %</b>' in found.to_html()) == bad


def test_long_names_break_between_words(report):
    named = dataclasses.replace(report.entries[1], name="fgsm_8_pixel")
    page = dataclasses.replace(report, entries=(report.entries[0], named)).to_html()
    assert '<th scope="row" class="measure">fgsm_<wbr>8_<wbr>pixel</th>' in page
    assert f"<dt>fgsm_<wbr>8_<wbr>pixel</dt><dd>{html.escape(named.description)}</dd>".replace("&#x27;", "&#39;") in page


def test_measures_stand_under_the_ball_they_belong_to(report):
    clean, attack = report.entries[:2]
    other = dataclasses.replace(attack, name="dimmed", epsilon=None, units="", norm="")
    length = dataclasses.replace(attack, name="long", norm="l2")
    groups = pages.grouped((clean, attack, other, length, report.entries[2]))
    assert groups == [
        ("", [clean]),
        ("Attacks, L-infinity norm, pixel units", [attack, report.entries[2]]),
        ("Other perturbations", [other]),
        ("Attacks, L2 norm, pixel units", [length]),
    ]


def test_the_page_needs_nothing_and_runs_nothing(report):
    page = report.to_html()
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|@import|url\((?!#)|(?:src|href)=\"(?!#)", page)


def test_text_is_escaped(report):
    spoiled = dataclasses.replace(report.entries[1], name="<script>alert(1)</script>", description='"><img src=x>')
    finding = Finding("a_<b>", "<i>evidence</i>")
    page = dataclasses.replace(report, entries=(report.entries[0], spoiled), masking=[finding]).to_html("</title><script>")
    assert "<script" not in page
    assert "<img" not in page
    assert "<i>evidence" not in page


def test_the_answers_warn_where_the_summary_does(report):
    three = dataclasses.replace(report.entries[0], error=0.0, low=0.0, high=56.1, images=3)
    point = dataclasses.replace(report.curve[0], epsilon=8 / 255, error=100 / 3, low=6.1, high=79.2, images=3)
    few = dataclasses.replace(report, entries=(three,), curve=(point,), classes=2, masking=[])
    assert [row.bad for answer in pages.answers(few) for row in answer.rows] == [False, False, True]
    many = dataclasses.replace(few, entries=(dataclasses.replace(three, images=20),))
    assert [row.bad for answer in pages.answers(many) for row in answer.rows] == [True, True, False]


def test_what_was_not_measured_is_left_out(report):
    bare = dataclasses.replace(report, curve=(), translations=(), probes=())
    page = bare.to_html()
    for name in ("error-curve", "translations", "that the checks compared", "<svg"):
        assert name not in page
    assert page.count('<b class="bad">unknown</b> <small>no attack was run</small>') == 2, "and none can be trusted"
    assert "The settings of every measure" not in page, "the names say them"


@pytest.mark.parametrize(
    ("errors", "corner"),
    [
        ((2, 5, 20, 60), ("left", "bottom")),  # for a level of 50, at epsilons 0, 1, 4 and 8 of 8
        ((51, 80, 95, 100), ("left", "top")),
        ((30, 80, 95, 100), ("right", "bottom")),
        ((30, 80, 70, 52), ("right", "top")),
        ((40, 60, 40, 53), ("left", "bottom")),  # all are crossed
    ],
)
def test_the_word_at_the_level_of_guessing_crosses_no_line(report, errors, corner):
    point = report.curve[0]
    points = [dataclasses.replace(point, epsilon=e, error=y) for e, y in zip((0, 1, 4, 8), errors, strict=True)]
    low = pages.CurveLine("low", 2, tuple(dataclasses.replace(one, error=1.0) for one in points))
    assert pages.free_corner([low, pages.CurveLine("net", 1, tuple(points))], 50.0) == corner


def test_labels_of_ticks_leave_room_for_each_other():
    assert pages.tick_labels([0, 1, 2, 4, 8, 16, 25]) == ["0", "1", "2", "4", "8", "16", "25"]
    assert pages.tick_labels([0, 0.005, 0.02, 0.1]) == ["0", "", "0.02", "0.1"]
    assert pages.tick_labels([0, 0.001, 0.005, 0.02, 0.1, 0.5]) == ["0", "", "", "", "0.1", "0.5"]
    assert pages.tick_labels([0]) == ["0"]


@pytest.mark.parametrize(
    ("verdict", "value", "bad"),
    [
        ("no sign of masking", "yes", False),
        ("masked: gradients vanish, noise beats gradient", "no", True),
        ("too few images to tell masked gradients", "cannot be told", True),
        ("learned nothing: one answer for all", "cannot be told", True),
    ],
)
def test_trust_in_a_word(verdict, value, bad):
    row = pages.trust(verdict)
    assert (row.value, row.bad) == (value, bad)


@pytest.mark.slow
def test_the_plot_is_about_one_ball(report):
    _, _, images, labels = digits()
    found = evaluate(trained(), images[:25], labels[:25], [PGD(0.5, 0.1, 3, norm="l2"), PGD(1.0, 0.2, 3, norm="l2")], seed=0)
    assert "ε, L2 norm" in found.to_html()
    assert "guessing" in found.to_html()
    assert {point.norm for point in pages.plotted_family(found.curve + report.curve)} == {"linf"}


@pytest.mark.parametrize(("package", "module"), [("jinja2", "jinja2"), ("matplotlib", "matplotlib.figure")])
def test_a_missing_package_is_named_with_its_extra(report, monkeypatch, package, module):
    monkeypatch.setitem(sys.modules, module, None)
    pages.templates.cache_clear()
    with pytest.raises(
        MissingExtraError, match=rf"needs the package {package}; install it with: pip install 'wassersmooth\[study\]'"
    ):
        report.to_html()
    pages.templates.cache_clear()
