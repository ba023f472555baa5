"""A model whose code was changed after training is refused, although its weights still fit."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.study.small_studies import tiny_run, train_to_the_end
from wassersmooth.study import checkpoints
from wassersmooth.study.data import Dataset
from wassersmooth.study.errors import StudyError
from wassersmooth.study.model_fingerprint import fixed_scores, require_same_scores
from wassersmooth.study.runs import Run

Factory = Callable[[int, int], nn.Module]


class Drawing(nn.Module):
    """Random in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Refusing(nn.Module):
    """Refuses batches of two images in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) == 2:
            raise RuntimeError("not these")
        return x


class Blind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0


def flat(*layers: nn.Module) -> Factory:
    return lambda channels, classes: nn.Sequential(
        nn.Flatten(), nn.Linear(64 * channels, 8), *layers, nn.BatchNorm1d(8), nn.Linear(8, classes)
    )


def own_network(monkeypatch: pytest.MonkeyPatch, factory: Factory) -> None:
    module = types.ModuleType("own_networks")
    module.net = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_networks", module)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Dataset]:
    own_network(monkeypatch, flat(nn.ReLU()))
    run, loaded = tiny_run(tmp_path, model="own_networks:net", epochs=2)
    train_to_the_end(run, loaded)
    return run, loaded


def test_a_model_whose_code_was_changed_is_not_loaded(trained: tuple[Run, Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = trained
    run.load_model()
    for layer in (nn.Tanh(), nn.LeakyReLU(0.1), Drawing(), Refusing()):
        own_network(monkeypatch, flat(layer))
        with pytest.raises(StudyError, match=r"model\.safetensors holds the weights of another network: .*; restore") as caught:
            run.load_model()
        assert "\n" not in str(caught.value)


def test_training_does_not_resume_with_another_network(trained: tuple[Run, Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    run, loaded = trained
    (run.folder / "model.safetensors").unlink()
    before = run.checkpoint_path.read_bytes()
    own_network(monkeypatch, flat(nn.Tanh()))
    with pytest.raises(StudyError, match=r"checkpoint\.safetensors holds the weights of another network"):
        train_to_the_end(run, loaded)
    assert run.checkpoint_path.read_bytes() == before
    own_network(monkeypatch, flat(nn.ReLU()))
    train_to_the_end(run, loaded)
    assert run.finished


def test_files_without_scores_load_as_before(trained: tuple[Run, Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = trained
    path = run.folder / "model.safetensors"
    stored = checkpoints.load(path)
    earlier = {key: value for key, value in stored.facts.items() if key not in ("scores", "height", "width")}
    checkpoints.save(path, stored.tensors, earlier)
    own_network(monkeypatch, flat(nn.Tanh()))
    assert not run.load_model().training


@pytest.mark.parametrize("layer", [Drawing, Refusing, Blind])
def test_useless_scores_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: Callable[[], nn.Module]) -> None:
    own_network(monkeypatch, flat(layer()))
    run, loaded = tiny_run(tmp_path, model="own_networks:net", epochs=1)
    assert fixed_scores(sys.modules["own_networks"].net(1, 3), (1, 8, 8)) is None
    if layer is not Blind:  # it cannot be trained
        train_to_the_end(run, loaded)
        assert checkpoints.load(run.folder / "model.safetensors").facts["scores"] is None
        run.load_model()


class Tossing(nn.Module):
    """One random bit for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else -x


def test_a_network_with_one_random_bit_has_no_fixed_scores() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        assert fixed_scores(flat(Tossing())(1, 3), (1, 8, 8)) is None


class Large(nn.Module):
    """Scores with uninformative sizes: one class is masked, and all have an offset."""

    def __init__(self, offset: float, masked: float) -> None:
        super().__init__()
        self.offset, self.masked = offset, masked

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat((z + self.offset, z.new_full((len(z), 1), self.masked)), 1)


@pytest.mark.parametrize(("offset", "masked"), [(0, -1e9), (3e5, 0), (1e4, -1e9)])
def test_large_scores_do_not_hide_another_network(offset: float, masked: float) -> None:
    def network(activation: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(flat(activation)(1, 3), Large(offset, masked))

    then = {"scores": fixed_scores(network(nn.ReLU()), (1, 8, 8))}
    assert then["scores"] is not None
    require_same_scores(network(nn.ReLU()), then, (1, 8, 8), Path("model"))
    with pytest.raises(StudyError, match="another network"):
        require_same_scores(network(nn.Tanh()), then, (1, 8, 8), Path("model"))


@pytest.mark.parametrize("tolerance", [1e-3, 1e-2])
def test_other_kernels_count_as_the_same_network(tolerance: float) -> None:
    """Sums of large products round by more than the spread of the scores; the tolerance is relative to the largest score."""
    torch.manual_seed(0)
    model = nn.Sequential(flat(nn.ReLU())(1, 3), Large(5, 5))
    stored = fixed_scores(model, (1, 8, 8))
    largest = torch.tensor(stored).abs().max()
    rounded, other = ({"scores": (torch.tensor(stored) + s * tolerance * largest).tolist()} for s in (0.9, 1.1))
    require_same_scores(model, rounded, (1, 8, 8), Path("model"), tolerance)
    with pytest.raises(StudyError, match="another network"):
        require_same_scores(model, other, (1, 8, 8), Path("model"), tolerance)


def test_weights_that_are_not_finite_are_left_to_the_evaluation() -> None:
    model = flat(nn.ReLU())(1, 3)
    facts = {"scores": fixed_scores(model, (1, 8, 8))}
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)  # type: ignore[index, union-attr, operator]
    require_same_scores(model, facts, (1, 8, 8), Path("model"))


def test_scores_leave_the_model_and_the_random_state_alone(trained: tuple[Run, Dataset]) -> None:
    run, _ = trained
    random = torch.get_rng_state()
    model = run.load_model()
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert fixed_scores(model, (1, 8, 8)) is not None
    assert model.training
    assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())
    assert torch.get_rng_state().equal(random)


def test_scores_of_a_random_network_do_not_change_the_random_state() -> None:
    model = flat(Drawing())(1, 3)
    random = torch.get_rng_state()
    fixed_scores(model, (1, 8, 8))
    assert torch.get_rng_state().equal(random)


def test_a_factory_with_random_constants_gives_the_trained_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.rand(8)  # neither parameter nor buffer

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    own_network(monkeypatch, lambda channels, classes: flat(Masked())(channels, classes))  # each call draws another mask
    run, loaded = tiny_run(tmp_path, model="own_networks:net", epochs=1, seeds=(3,))
    train_to_the_end(run, loaded)
    model = run.load_model()
    wrong = (model(loaded.validation.images).argmax(1) != loaded.validation.labels).double().mean().item()
    assert 100 * wrong == pytest.approx(run.metrics()[-1]["validation_error"])
