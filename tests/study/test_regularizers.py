"""The table of kinds: what one entry brings along, and that the manual has them all."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from wassersmooth.geometry.coherent_motion import Deformations
from wassersmooth.learning.losses import SmoothedCrossEntropy
from wassersmooth.learning.objectives import NoisyInputs
from wassersmooth.study.config import Study
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import GROUPS, KINDS, NOISE, Kind, Regularizer, color_of, group_of, heading_of, title_of

MANUAL = Path(__file__).parents[2] / "docs" / "study.md"


def test_every_kind_is_built_in_one_way_and_looks_like_no_other() -> None:
    for kind in KINDS.values():
        assert sum(build is not None for build in (kind.objective, kind.penalty, kind.attack, kind.around)) == 1
        assert kind.group in GROUPS
    assert len({kind.color for kind in KINDS.values()}) == len({kind.title for kind in KINDS.values()}) == len(KINDS)


def test_the_manual_and_the_help_name_every_kind() -> None:
    text, words = MANUAL.read_text(), re.findall(r"[\w-]+", inspect.getsource(Study))
    assert [name for name in KINDS if f"`{name}`" not in text or name not in words] == []


def test_a_new_kind_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "loud-noise", Kind("loud noise", "#123456", NOISE, objective=NoisyInputs))
    point = Regularizer.parse("loud-noise:eta=0.5")
    terms = point.objective((4, 4), "auto")(torch.nn.Flatten(), torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    assert torch.isfinite(terms.total)
    assert (title_of("loud-noise"), heading_of("loud-noise"), color_of("loud-noise")) == ("loud noise", "Loud noise", "#123456")
    assert group_of("loud-noise") is NOISE


def test_combinations_and_kinds_of_a_later_version_have_titles_colors_and_groups() -> None:
    assert title_of("wasserstein+later") == "Wasserstein + later"
    assert color_of("wasserstein+later") != color_of("later") == "#000000"
    assert (group_of("wasserstein+later").side, group_of("later").side) == ("Combinations", "Others")


@pytest.mark.parametrize("kind", ["deformation", "advection", "deformation-noise", "advection-noise"])
def test_coherent_motion(kind: str) -> None:
    point = Regularizer.parse(f"{kind}:eta=0.5,mass=0.1")
    assert str(point) == f"{kind}:eta=0.5,mass=0.1,smoothness=2"
    metric = point.metric(4, 5)
    motion = "advection" if "advection" in kind else "transport"
    assert metric == Deformations(4, 5, 2.0, motion, 0.1)  # type: ignore[arg-type]
    terms = point.objective((4, 5), "double_backward")(torch.nn.Flatten(), torch.rand(2, 1, 4, 5), torch.tensor([0, 1]))
    assert torch.isfinite(terms.total)
    with pytest.raises(StudyError, match=r"smoothness must be positive for .*leave it out"):
        Regularizer.parse("euclidean:eta=1,smoothness=2")
    with pytest.raises(StudyError, match=r"radius and mass belong to .*leave them out"):
        Regularizer.parse(f"{kind}:eta=1,radius=2")


@pytest.mark.parametrize("kind", ["dual-norm+displaced", "euclidean-length+linearity"])
def test_random_points_are_combined_with_a_penalty(kind: str) -> None:
    point = Regularizer.parse(f"{kind}:eta=0.5,epsilon=8/255")
    assert str(point) == f"{kind}:eta=0.5,epsilon=8/255"
    assert group_of(kind).side == "Penalties"
    objective = point.objective((4, 4), "double_backward", loss=SmoothedCrossEntropy(0.1))
    assert objective.penalty.loss == SmoothedCrossEntropy(0.1)  # type: ignore[attr-defined]
    assert objective.epsilon == 8 / 255  # type: ignore[attr-defined]
    for wrong in (f"{kind}:eta=0.5", kind.partition("+")[2] + ":eta=0.1", f"adversarial+{kind.partition('+')[2]}:eta=0.1"):
        with pytest.raises(StudyError):
            Regularizer.parse(wrong)


@pytest.mark.parametrize("text", ["none", "pgd7:eta=8/255", "dual-norm+adversarial:eta=1,epsilon=8/255", "dual-margin:eta=1"])
def test_every_part_gets_the_loss(text: str) -> None:
    loss = SmoothedCrossEntropy(0.1)
    objective = Regularizer.parse(text).objective((4, 4), "double_backward", loss=loss)
    assert objective.loss == loss  # type: ignore[attr-defined]
    assert getattr(getattr(objective, "penalty", None), "loss", loss) == loss


def test_a_loss_that_an_objective_does_not_have_is_refused() -> None:
    with pytest.raises(StudyError, match="loss must be one of"):
        Regularizer.parse("tikhonov:eta=0.1,radius=1").objective((4, 4), "double_backward", loss=SmoothedCrossEntropy(0.1))
