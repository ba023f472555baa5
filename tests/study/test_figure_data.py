"""What the pictures are made of: chosen blindly, right, stored safely, and the model as it was found."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.study.fake_runs import digit_like_images, random_classifier
from wassersmooth import Normalized, transport
from wassersmooth.robustness.variations import label_flips
from wassersmooth.study import figure_data
from wassersmooth.study.report.pictures import _magnification, png


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> figure_data.FigureData:
    images, labels = digit_like_images()
    path = tmp_path_factory.mktemp("run") / figure_data.FILE
    assert figure_data.collect(random_classifier(), images, labels, path, curve_images=20) == path
    return figure_data.load(path)


def test_the_strip_agrees_with_the_count_of_label_flips(kept: figure_data.FigureData) -> None:
    images, labels = digit_like_images()
    first = figure_data.chosen_by_content(images, labels)[: figure_data.STRIPS]
    assert kept.facts["strip"]["shifts"] == list(range(-8, 9))
    assert kept.facts["strip"]["labels"] == labels[first].tolist()
    predicted = kept.tensors["strip/predicted"]
    flips = (predicted[:, 1:] != predicted[:, :-1]).sum(1)
    assert torch.equal(flips, label_flips(random_classifier(), images[first], reach=8))
    frames = kept.tensors["strip/frames"]
    assert torch.equal(frames[:, 8], (images[first] * 255).round().to(torch.uint8)), "shift 0 is the image itself"
    assert torch.equal(frames[:, 10, :, :, 2:], frames[:, 8, :, :, :-2]), "shift 2 is two pixels to the right"


def test_perturbations_are_those_of_the_attacks(kept: figure_data.FigureData) -> None:
    original, fgsm, moved = (kept.tensors[f"perturbation/{name}"] for name in ("original", "fgsm", "wasserstein"))
    assert float((fgsm - original).abs().max()) == pytest.approx(8 / 255, rel=1e-5)
    assert torch.allclose(moved.sum((-2, -1)), original.sum((-2, -1)), rtol=1e-5), "mass is moved, never made"
    assert float((moved - original).abs().max()) > 1e-3
    with torch.no_grad():
        predicted = torch.stack([random_classifier()(x).argmax(1) for x in (original, fgsm, moved)], dim=1)
    assert torch.equal(kept.tensors["perturbation/predicted"], predicted)


def test_neighbors_are_at_one_distance(kept: figure_data.FigureData) -> None:
    source = kept.tensors["neighbors/source"].double()
    straight, moved = kept.tensors["neighbors/l2"].double(), kept.tensors["neighbors/w2"].double()
    assert len(straight) == len(moved) == 8
    lengths = (straight - source).flatten(1).norm(dim=1)
    assert torch.allclose(lengths, torch.full_like(lengths, kept.facts["distance/l2"]), rtol=1e-4)
    distances = transport.w2(source.expand_as(moved).contiguous(), moved)
    assert torch.allclose(distances, torch.full_like(distances, kept.facts["distance/w2"]), rtol=5e-3)


def test_the_curve_begins_at_the_clean_error_in_both_units(kept: figure_data.FigureData) -> None:
    curve = kept.facts["curve"]
    assert set(curve["errors"]) == {"fgsm_pixel", "ifgsm10_pixel", "fgsm_normalized", "ifgsm10_normalized"}
    assert curve["levels"][0] == 0
    assert {len(values) for values in curve["errors"].values()} == {len(curve["levels"])}
    assert len({values[0] for values in curve["errors"].values()}) == 1
    assert curve["images"] == 20


def test_a_model_without_normalization_has_pixel_units_alone(tmp_path: Path) -> None:
    images, labels = digit_like_images(12)
    bare = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 10))
    path = figure_data.collect(bare, images, labels, tmp_path / "x", neighborhoods=False)
    kept = figure_data.load(path)
    assert set(kept.facts["curve"]["errors"]) == {"fgsm_pixel", "ifgsm10_pixel"}
    assert not [name for name in kept.tensors if name.startswith("neighbors")]


def test_images_are_chosen_by_content_whatever_their_order_and_every_class_has_its_turn() -> None:
    images, labels = digit_like_images()
    order = figure_data.chosen_by_content(images, labels)
    assert sorted(order) == list(range(len(images)))
    turned = figure_data.chosen_by_content(images.flip(0), labels.flip(0))
    assert torch.equal(images[order], images.flip(0)[turned])
    classes = len(labels.unique())
    assert len(labels[order[:classes]].unique()) == classes


def test_the_model_comes_back_as_it_was(tmp_path: Path) -> None:
    images, labels = digit_like_images(12)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(784, 10))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    figure_data.collect(model, images, labels, tmp_path / "x", neighborhoods=False)
    assert model.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_without_the_transport_package_figure_1_is_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    images, labels = digit_like_images(12)
    kept = figure_data.load(figure_data.collect(random_classifier(), images, labels, tmp_path / "x", curve_images=4))
    assert not [name for name in kept.tensors if name.startswith("neighbors")]
    assert any("wassersmooth[ot]" in note for note in kept.notes)


def test_color_images_borrow_digits_for_figure_1(tmp_path: Path) -> None:
    images, labels = digit_like_images(12)
    color = images.expand(-1, 3, -1, -1).contiguous()
    kept = figure_data.load(figure_data.collect(random_classifier(channels=3), color, labels, tmp_path / "x", curve_images=4))
    assert kept.tensors["neighbors/source"].shape == (1, 1, 16, 16)
    assert kept.facts["neighbors"]["origin"] == "the digits of scikit-learn"
    assert kept.tensors["perturbation/original"].shape[1] == 3


def test_black_images_have_no_neighborhood(tmp_path: Path) -> None:
    images, labels = torch.zeros(4, 1, 16, 16), torch.arange(4)
    kept = figure_data.load(figure_data.collect(random_classifier(), images, labels, tmp_path / "x", curve_images=4))
    assert any("not black" in note for note in kept.notes)


def test_an_ensemble_with_two_normalizations_has_pixel_units_alone(tmp_path: Path) -> None:
    images, labels = digit_like_images(6)
    model = Mean(Normalized(random_classifier(), 0.5, 0.2), Normalized(random_classifier(), 0.5, 0.3))
    kept = figure_data.load(figure_data.collect(model, images, labels, tmp_path / "x", curve_images=4, neighborhoods=False))
    assert set(kept.facts["curve"]["errors"]) == {"fgsm_pixel", f"ifgsm{figure_data.CURVE_ITERATIONS}_pixel"}


def test_an_image_of_one_pixel_has_no_transport(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 4))
    images, labels = torch.rand(5, 3, 1, 1), torch.arange(5) % 4
    kept = figure_data.load(figure_data.collect(model, images, labels, tmp_path / "x", curve_images=4, neighborhoods=False))
    assert any("one pixel" in note for note in kept.notes)
    assert kept.facts["curve"]["images"] == 4


def test_a_curve_that_does_not_fit_into_memory_is_measured_in_smaller_batches(tmp_path: Path) -> None:
    images, labels = digit_like_images(8)
    model, curves = random_classifier(), []
    for asked in (model, SmallMemory(model, most=3)):
        path = figure_data.collect(asked, images, labels, tmp_path / "x", curve_images=8, neighborhoods=False)
        curves.append(figure_data.load(path).facts["curve"])
    assert curves[0] == curves[1]


def test_a_broken_file_is_a_complaint(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no safetensors at all")
    with pytest.raises(ValueError, match="deserializing header"):
        figure_data.load(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        figure_data.load(tmp_path / "y")


class Mean(torch.nn.Module):
    """An ensemble."""

    def __init__(self, *members: torch.nn.Module) -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(members)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([member(images) for member in self.members]).mean(0)


class SmallMemory(torch.nn.Module):
    """Takes a few images at a time."""

    def __init__(self, model: torch.nn.Module, most: int) -> None:
        super().__init__()
        self.model, self.most = model, most

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and len(images) > self.most:
            raise torch.OutOfMemoryError("too many")
        out: torch.Tensor = self.model(images)
        return out


@pytest.mark.parametrize("channels", [1, 3])
def test_the_png_has_the_pixels_of_the_image(channels: int) -> None:
    from matplotlib.image import imread

    pixels = torch.randint(0, 256, (channels, 5, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    seen = np.round(imread(io.BytesIO(png(pixels)), format="png") * 255).astype(np.uint8).reshape(5, 7, channels)
    assert np.array_equal(seen, pixels.permute(1, 2, 0).numpy())


def test_one_factor_magnifies_the_largest_changes_to_full_color() -> None:
    assert _magnification([torch.zeros(1, 1, 4, 4)]) == 1.0
    assert _magnification([torch.full((1, 1, 4, 4), 0.05), torch.full((1, 1, 4, 4), -0.1)]) == pytest.approx(5.0)
