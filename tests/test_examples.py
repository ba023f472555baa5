"""The programs of examples/ run as they stand, and do what they say. Those of other packages are skipped without them."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDED = {
    "accelerate_loop": "accelerate",
    "hugging_face_classifier": "transformers",
    "lightning_module": "lightning",
    "timm_classifier": "timm",
}
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def run(name: str, capsys: pytest.CaptureFixture[str]) -> list[list[float]]:
    """Run a program; the numbers in each line that it prints."""
    if package := NEEDED.get(name):
        try:
            importlib.import_module(package)
        except Exception as error:  # a torchvision of another build than torch raises a RuntimeError
            pytest.skip(f"examples/{name}.py needs {package}, which cannot be imported: {type(error).__name__}")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    return [[float(number) for number in re.findall(r"-?\d+\.\d+", line)] for line in lines]


def test_all_recipes_are_there() -> None:
    assert set(PROGRAMS) == set(NEEDED) | {"forces", "gan_critic", "implicit_surface"}


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_recipe_of_another_package_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = [numbers for numbers in run(name, capsys) if len(numbers) >= 2]
    assert printed
    assert all(0 <= number < 100 for numbers in printed for number in numbers)


def test_energies_and_forces_are_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    (_, first), *_, (energies, forces) = run("forces", capsys)
    assert energies < 0.05
    assert forces < first / 4


def test_the_penalty_keeps_a_critic_flat(capsys: pytest.CaptureFixture[str]) -> None:
    losses, penalties = zip(*run("gan_critic", capsys), strict=True)
    assert losses[-1] < 0.7  # better than guessing, 0.69, or nearly
    assert max(penalties) < 0.5


def test_a_distance_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    *_, (true, away, on) = run("implicit_surface", capsys)
    assert away == pytest.approx(true, abs=0.08)
    assert on < 0.06
