"""Pages in a real Chromium: no console error, every figure visible, no sideways scrolling on a phone, light and dark.

There is the page of a study, and that of a single model, which may be anybody's.

The page is shown in a frame of the wanted width, since a headless window is never narrower than 500 pixels. A script, put
into a copy of the page, measures it there and hands the numbers to the page around it, whose DOM Chromium prints.
"""

import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.study.fake_runs import digit_like_images, fake_study, random_classifier
from wassersmooth.robustness.attacks import FGSM
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.findings import Finding
from wassersmooth.study.report.page import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--enable-logging=stderr", "--virtual-time-budget=10000"),
)
DARK = "--blink-settings=preferredColorScheme=0"
READABLE = 4.5  # contrast of text, by the Web Content Accessibility Guidelines (AA)

AROUND = """<!DOCTYPE html><body><script>
addEventListener('message', event => { document.body.dataset.found = JSON.stringify(event.data); });
</script><iframe src="page.html" style="border:0; width:WIDTHpx; height:900px"></iframe></body>"""

MEASURE = """<script>
addEventListener('load', () => {
  document.querySelectorAll('details').forEach(element => { element.open = true; });
  const size = element => { const r = element.getBoundingClientRect(); return [r.width, r.height]; };
  const shown = selector => [...document.querySelectorAll(selector)].map(element => ({
    what: element.id || element.getAttribute('alt') || element.getAttribute('aria-label') || element.outerHTML.slice(0, 60),
    size: size(element), visible: element.checkVisibility(), loaded: element.naturalWidth !== 0,
  }));
  const wide = [...document.querySelectorAll('body *')].filter(element => !element.closest('.scroll, svg')
    && element.getBoundingClientRect().right > innerWidth + 0.5).map(element => element.outerHTML.slice(0, 80));
  const style = element => getComputedStyle(element);
  // What is cut off at the side must say so, by a shadow at the edge.
  const uncued = [...document.querySelectorAll('body *')].filter(element => !element.closest('svg')
    && element.scrollWidth > element.clientWidth + 1 && style(element).overflowX !== 'visible'
    && !style(element).backgroundImage.includes('gradient')).map(element => element.outerHTML.slice(0, 80));
  const colors = ['body', '.kicker', '.sub', 'figcaption', '.paper', 'th small', '.wrong', '.right', '.warnings li',
    '.answer h2', '.answer small', '.bad']
    .map(selector => [selector, document.querySelector(selector)]).filter(([_, element]) => element)
    .map(([selector, element]) => { let behind = element;
      while (style(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
      return [selector, style(element).color, style(behind).backgroundColor]; });
  parent.postMessage({ width: innerWidth, scroll: document.documentElement.scrollWidth, wide, uncued, colors,
    dark: matchMedia('(prefers-color-scheme: dark)').matches,
    figures: shown('figure'), pictures: shown('img, svg:not([aria-hidden])') }, '*');
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        reason = f"no browser on the PATH (looked for {', '.join(BROWSERS)})"
        if os.environ.get("WASSERSMOOTH_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{reason}, and WASSERSMOOTH_REQUIRE_BROWSER=1 asks for one")
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything in it, warnings and names without a place to break included."""
    folder = fake_study(tmp_path_factory.mktemp("runs") / "made-up", seeds=2)
    broken = folder / ("long" * 30)
    broken.mkdir()
    (broken / "config.json").write_text("not json")
    next(folder.glob("none-seed1")).rename(folder / f"none-{'x' * 150}")
    return write_report(folder)


@pytest.fixture(scope="module")
def own_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model of one's own, with long names and findings."""
    images, labels = digit_like_images(30)
    attacks = {f"{'very_' * 12}long_name": FGSM(25 / 255)} | {f"fgsm_{n}": FGSM(n / 255) for n in (2, 8)}
    report = evaluate(random_classifier(), images, labels, attacks, seed=0)
    finding = Finding("gradients_vanish", f"exactly zero on {'x' * 90} images")
    path = tmp_path_factory.mktemp("own") / "report.html"
    path.write_text(dataclasses.replace(report, masking=[finding]).to_html("net_" * 40))
    return path


def show(browser: str, report: Path, place: Path, width: int, dark: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What the script measured, and what the console said."""
    page = report.read_text()
    assert page.count("<head>") == 1
    (place / "page.html").write_text(page.replace("<head>", f"<head>{MEASURE}"))  # before the policy that forbids scripts
    (place / "around.html").write_text(AROUND.replace("WIDTH", str(width)))
    window = f"--window-size={max(width, 500)},1000"
    command = [browser, *FLAGS, *([DARK] if dark else []), window, f"--user-data-dir={place / 'profile'}", "--dump-dom"]
    ended = subprocess.run([*command, (place / "around.html").as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', ended.stdout)
    assert found, f"the page was not shown: {ended.stderr[-2000:]}"
    console = [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(found[1])), console


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(browser: str, report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen, console = show(browser, report, tmp_path, width, dark)
    assert console == []
    assert (seen["width"], seen["dark"]) == (width, dark)
    assert seen["scroll"] <= width, f"the page scrolls sideways: {seen['wide'][:5]}"
    assert seen["wide"] == []
    assert seen["uncued"] == []
    assert len(seen["figures"]) == 12
    assert len(seen["pictures"]) > 50
    for element in seen["figures"] + seen["pictures"]:
        assert element["visible"], element["what"]
        assert min(element["size"]) >= 10, element
        assert element["loaded"], element["what"]
    for selector, ink, behind in seen["colors"]:
        assert contrast(ink, behind) >= READABLE, f"{selector}: {ink} on {behind}"


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_ones_own_model_in_a_browser(browser: str, own_page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen, console = show(browser, own_page, tmp_path, width, dark)
    assert console == []
    assert (seen["width"], seen["dark"]) == (width, dark)
    assert seen["scroll"] <= width, f"the page scrolls sideways: {seen['wide'][:5]}"
    assert seen["wide"] == []
    assert seen["uncued"] == []
    assert len(seen["figures"]) == 4, "the plot, errors, flips, probes"
    assert len(seen["pictures"]) == 1
    for element in seen["figures"] + seen["pictures"]:
        assert element["visible"], element["what"]
        assert min(element["size"]) >= 10, element
    assert {".answer h2", ".bad"} <= {selector for selector, _, _ in seen["colors"]}
    for selector, ink, behind in seen["colors"]:
        assert contrast(ink, behind) >= READABLE, f"{selector}: {ink} on {behind}"


def test_what_is_tested_can_fail(browser: str, report: Path, tmp_path: Path) -> None:
    """A page with a wide element, a hidden figure and a script against the policy is caught."""
    spoiled = tmp_path / "spoiled.html"
    cut = '<div id="cut" style="overflow:hidden"><p style="width:700px">cut</p></div>'
    wide = cut + '<div style="width:700px">wide</div><figure id="empty"></figure><script>1</script></body>'
    spoiled.write_text(report.read_text().replace("</body>", wide))
    seen, console = show(browser, spoiled, tmp_path, 400)
    assert seen["scroll"] > 400
    assert any("wide" in element for element in seen["wide"])
    assert any('id="cut"' in element for element in seen["uncued"])
    assert [element["what"] for element in seen["figures"] if min(element["size"]) < 10] == ["empty"]
    assert any("Content Security Policy" in line for line in console)


def contrast(ink: str, behind: str) -> float:
    """Of two colors as a browser writes them, rgb(r, g, b)."""
    first, second = sorted((_luminance(ink), _luminance(behind)), reverse=True)
    return (first + 0.05) / (second + 0.05)


def _luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
