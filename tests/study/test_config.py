"""Configuration is data: presets parse, files are checked, and what is stored comes back."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.study.small_studies import stripes_file
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Wasserstein
from wassersmooth.learning.covector_norms import DualNorm
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.study import data, presets
from wassersmooth.study.commands import StudyCommand
from wassersmooth.study.config import Data, RunConfig, Study, Training, flatten, with_values
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import (
    AROUND,
    ATTACKS,
    IN_MOTION,
    KINDS,
    OF_YOUR_OWN,
    ON_A_GRAPH,
    PENALTIES,
    Regularizer,
    strength_label,
)


@pytest.mark.parametrize("name", [name for name in presets.names() if name != "cifar10-sweep"])
def test_each_preset_parses_and_has_the_three_columns_of_the_paper(name: str) -> None:
    study = presets.with_preset(Study(), name)
    kinds = [Regularizer.parse(text).kind for text in study.regularizers]
    assert kinds == ["none", "euclidean", "wasserstein"]
    assert {run.name for run in study.runs(name)} == {
        f"{Regularizer.parse(t).slug}-seed{s}" for t in study.regularizers for s in study.seeds
    }


def test_the_help_names_every_preset() -> None:
    words = re.findall(r"[\w-]+", inspect.getsource(StudyCommand))
    assert [name for name in presets.names() if name not in words] == []


@pytest.mark.parametrize(("former", "now"), [("publication", "paper"), ("frontier", "standard")])
def test_a_run_that_names_a_suite_of_earlier_versions_opens(former: str, now: str) -> None:
    stored = Study().runs("digits")[0].to_flat()
    assert RunConfig.from_flat(stored | {"suite": former}, "here").evaluation.suite == now
    with pytest.raises(StudyError, match=r"here: suite must be one of .*; got \[\]"):
        RunConfig.from_flat(stored | {"suite": []}, "here")
    with pytest.raises(StudyError, match="suite must be one of 'quick', 'paper', 'standard', 'full'; got 'publication'"):
        with_values(Study(), {"suite": "publication"}, "mine.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("euclidean:eta=0.3", GradientPenalty(Euclidean(), 0.3)),
        ("dual-norm:eta=0.3", GradientPenalty(DualNorm(), 0.3)),
        ("euclidean-length:eta=0.3", GradientPenalty(Euclidean(), 0.3, power=1)),
        ("dual-length:eta=0.3", GradientPenalty(DualNorm(), 0.3, power=1)),
        (
            "wasserstein-length:eta=0.3,radius=2,mass=0.5",
            GradientPenalty(Wasserstein(PixelGraph.grid(8, 8, 2), mass=0.5), 0.3, power=1),
        ),
        ("tikhonov-euclidean:eta=0.3", Tikhonov(Euclidean(), 0.3)),
        (
            "tikhonov-curvature:eta=0.3,radius=2",
            Tikhonov(Wasserstein(PixelGraph.grid(8, 8, 2)), 0.3, laplacian=None),
        ),
    ],
)
def test_a_regularizer_is_the_objective_it_says(text: str, expected: Objective) -> None:
    assert repr(Regularizer.parse(text).objective((8, 8), "double_backward")) == repr(expected)


def test_milestones_that_are_never_reached_are_remarked_on() -> None:
    assert Training(epochs=3, milestones=(1, 2)).remarks() == []
    (none,) = Training(epochs=1, milestones=(1,)).remarks()
    assert none.startswith("--milestones 1: never reached in 1 epoch, and the learning rate never falls; lower them below 1, ")
    (some,) = Training(epochs=3, milestones=(2, 5)).remarks()
    assert some.startswith("--milestones 5: never reached in 3 epochs, and the learning rate falls less often; ")


def test_the_paper_s_recipe() -> None:
    paper = flatten(presets.with_preset(Study(), "cifar10-paper"))
    expected = {"dataset": "cifar10", "model": "resnet20", "activation": "softplus", "epochs": 200, "batch_size": 128}
    expected |= {"learning_rate": 0.1, "milestones": (100, 150), "momentum": 0.9, "weight_decay": 1e-4, "augment": False}
    assert {key: paper[key] for key in expected} == expected


def test_an_unknown_key_fails_and_the_known_ones_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("epoch = 3\n")
    with pytest.raises(StudyError, match=r"unknown 'epoch'; known are .*epochs.*seeds"):
        presets.with_file(Study(), path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('epochs = "3"', "epochs must be int"),
        ("epochs = true", "epochs must be int"),
        ("epochs = 0", "epochs must be at least 1"),
        ('activation = "tanh"', "activation must be one of 'softplus'"),
        ("milestones = [3, 2]", "milestones must be rising epochs"),
        ('milestones = ["3"]', "milestones must be a list of int"),
        ("seeds = [1, 1]", "seeds must be one or more, each once"),
        ("seeds = [-1]", "seeds must be whole numbers"),
        ("momentum = 1.0", "momentum must be from 0 to below 1"),
        ("validation = 1.5", "validation must be a fraction"),
        ("validation = 0\npatience = 3", "patience needs a validation split"),
        ("learning_rate = inf", "learning_rate must be a positive number"),
        ("sweep = 3", r"sweep must be a table; got 3; write \[sweep\], and below it the flags of a grid"),
        ("this is no toml", "cannot be read as TOML"),
    ],
)
def test_bad_values_are_refused_in_one_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(line)
    with pytest.raises(StudyError, match=complaint) as caught:
        presets.with_file(Study(), path)
    assert "\n" not in str(caught.value)


def test_dashes_in_a_file_mean_underscores(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("batch-size = 7\n")
    assert presets.with_file(Study(), path).training.batch_size == 7


def test_no_two_groups_share_a_field_name() -> None:
    study = Study()
    groups = (study.data, study.model, study.training, study.machine, study.evaluation)
    assert len(flatten(study)) == sum(len(vars(group)) for group in groups)


@pytest.mark.parametrize("name", presets.names())
def test_a_stored_configuration_comes_back(name: str) -> None:
    for config in presets.with_preset(Study(), name).runs(name):
        stored = json.loads(json.dumps(config.to_flat()))
        assert RunConfig.from_flat(stored, "config.json") == config
        assert {"regularizer", "eta", "radius", "mass", "seed", "preset", "dataset", "model", "epochs"} <= stored.keys()


def test_a_foreign_configuration_is_named() -> None:
    with pytest.raises(StudyError, match=r"config\.json is not the configuration of a run"):
        RunConfig.from_flat({"lr": 3}, "config.json")


def test_values_are_converted_to_the_type_of_their_field() -> None:
    study = with_values(Study(), {"learning_rate": 1, "data_dir": "here", "seeds": [3]}, "test")
    assert type(study.training.learning_rate) is float
    assert study.data.data_dir == Path("here")
    assert study.seeds == (3,)


numbers = st.floats(1e-4, 1e3) | st.floats(1e-4, 1e3).map(lambda value: float(f"{value:g}"))
numbers |= st.integers(1, 255).map(lambda level: level / 255)


@given(
    kind=st.sampled_from(sorted(set(KINDS) - set(AROUND))), eta=numbers, radius=st.integers(1, 9), mass=st.just(0.0) | numbers
)
def test_a_regularizer_is_parsed_from_text(kind: str, eta: float, radius: int, mass: float) -> None:
    settings = {"radius": radius, "mass": mass} if kind in ON_A_GRAPH else {}
    settings = {"smoothness": eta, "mass": mass} if kind in IN_MOTION else settings
    factory = "my.metrics:blurred" if kind in OF_YOUR_OWN else ""
    point = Regularizer(kind, 0.0 if kind == "none" else eta, **settings, factory=factory)  # type: ignore[arg-type]
    assert Regularizer.parse(str(point)) == point
    assert not set(point.slug) & set("/:=, ")


@pytest.mark.parametrize(
    ("point", "text", "slug"),
    [
        (Regularizer("pgd7", 8 / 255), "pgd7:eta=8/255", "pgd7-eta8_255"),
        (Regularizer("wasserstein", 1.8, 8), "wasserstein:eta=1.8,radius=8", "wasserstein-eta1.8-radius8"),
        (Regularizer.parse("wasserstein:eta=1.8"), "wasserstein:eta=1.8,radius=8", "wasserstein-eta1.8-radius8"),
        (
            Regularizer.parse("euclidean+wasserstein-adversarial:eta=1,epsilon=2"),
            "euclidean+wasserstein-adversarial:eta=1,radius=8,epsilon=2",
            "euclidean+wasserstein-adversarial-eta1-radius8-epsilon2",
        ),
        (Regularizer("euclidean", 0.2), "euclidean:eta=0.2", "euclidean-eta0.2"),  # which is 51/255
        (Regularizer("euclidean", 0.1234567), "euclidean:eta=0.1234567", "euclidean-eta0.1234567"),
        (Regularizer("uniform", 1.0, 1000000), "uniform:eta=1,radius=1000000", "uniform-eta1-radius1000000"),
        (Regularizer("euclidean+pgd7", 1.0, epsilon=2 / 255), "euclidean+pgd7:eta=1,epsilon=2/255", None),
    ],
)
def test_the_text_of_a_regularizer_is_short_and_exact(point: Regularizer, text: str, slug: str | None) -> None:
    assert str(point) == text
    assert Regularizer.parse(text) == point
    assert slug is None or point.slug == slug


def test_a_label_has_four_digits_or_the_levels_of_a_pixel() -> None:
    assert [strength_label(value) for value in (8 / 255, 0.1234567, 1.0, 1e-5)] == ["8/255", "0.1235", "1", "1e-05"]


@given(penalty=st.sampled_from(PENALTIES), attack=st.sampled_from(ATTACKS), eta=numbers, epsilon=numbers)
def test_a_combination_is_parsed_from_text_and_comes_back(penalty: str, attack: str, eta: float, epsilon: float) -> None:
    radius = 2 if {penalty, attack} & set(ON_A_GRAPH) else 0
    smoothness = 1.5 if penalty in IN_MOTION else 0.0
    factory = "my.metrics:blurred" if penalty in OF_YOUR_OWN else ""
    point = Regularizer(f"{penalty}+{attack}", eta, radius, epsilon=epsilon, smoothness=smoothness, factory=factory)
    assert Regularizer.parse(str(point)) == point
    assert not set(point.slug) & set("/:=, ")
    (config,) = Study(regularizers=(str(point),)).runs("mine")
    assert RunConfig.from_flat(json.loads(json.dumps(config.to_flat())), "config.json") == config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("wassersteen:eta=1", "regularizer must be one of none, euclidean, wasserstein"),
        ("wasserstein:eta=1,radius=0", "needs a radius of at least 1 pixel; got radius=0 in wasserstein:eta=1; write"),
        ("wasserstein:eta=1,radius=1000001", "radius must be at most 1000000"),
        ("euclidean", "eta must be positive"),
        ("euclidean:eta=nan", "eta must be a finite number"),
        ("none:eta=1", "eta must be positive for every regularizer except none; got none:eta=1; leave its eta out"),
        ("euclidean:eta=1,radius=2", "radius and mass belong to"),
        ("euclidean:eta=a", "eta must be a number"),
        ("pgd7:eta=8/0", "eta must be a number, such as 0.3 or 8/255; got '8/0'"),
        ("pgd7:eta=8/inf", "eta must be a number"),
        ("pgd7:eta=inf/255", "eta must be a finite number"),
        ("pgd7:eta=8/255/2", "eta must be a number"),
        ("wasserstein:eta=1,radius=4/2", "radius must be a whole number"),
        ("wasserstein:eta=1,radius=1.5", "radius must be a whole number"),
        ("euclidean:eta=1,eta=2", "each once"),
        ("euclidean:strength=1", "KIND:eta=NUMBER"),
        ("pgd7:eta=0.1,radius=2", "radius and mass belong to"),
        ("euclidean:eta=1,epsilon=1", "epsilon, the size of the attack in PENALTY\\+ATTACK"),
        ("euclidean+pgd7:eta=1", "epsilon, the size of the attack in PENALTY\\+ATTACK"),
        ("euclidean+wasserstein-adversarial:eta=1,radius=-1,epsilon=1", "needs a radius"),
        ("pgd7+euclidean:eta=1,epsilon=1", r"or PENALTY\+ATTACK of euclidean, .*got 'pgd7\+euclidean'"),
    ],
)
def test_a_bad_regularizer_is_refused_with_the_remedy(text: str, complaint: str) -> None:
    with pytest.raises(StudyError, match=complaint):
        Study(regularizers=(text,))


def test_data_beside_a_file_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, here = tmp_path / "own", tmp_path / "here"
    (own / "sets").mkdir(parents=True)
    (own / "digits").mkdir()
    here.mkdir()
    stripes_file(own / "sets")
    path = own / "mine.toml"
    monkeypatch.chdir(here)

    def read(text: str) -> Data:
        path.write_text(text)
        return presets.with_file(Study(), Path("../own/mine.toml")).data

    found = read('dataset = "sets/stripes.npz"')
    assert (found.dataset, found.data_dir) == ("sets/stripes.npz", own), "written as it is, wherever the command is given"
    assert data.load(found).classes == 3
    found = read('dataset = "stripes.npz"\ndata-dir = "sets"')
    assert (found.dataset, found.data_dir) == ("stripes.npz", own / "sets")
    assert data.load(found).classes == 3
    assert read('dataset = "digits"').data_dir is None
    assert read('dataset = "nowhere.npz"').data_dir is None
    monkeypatch.chdir(own)
    assert read('dataset = "sets/stripes.npz"').data_dir is None
