"""Normalization inside the model: the types of mean and std, and images with another number of channels."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compare import assert_matches
from wassersmooth import Normalized
from wassersmooth.normalized import find_units

MEAN, STD = [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]


def colored() -> Normalized:
    return Normalized(nn.Identity(), MEAN, STD)


def normalized(images):
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    return (images - mean) / std


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 4, 4, 4), (1, 4, 4), (3, 4)])
def test_other_channels_are_refused_and_not_broadcast(shape):
    with pytest.raises(ValueError, match=r"shape \(B, 3, H, W\).*got .*one number per channel"):
        colored()(torch.rand(shape))
    with pytest.raises(ValueError, match=r"shape \(B, C, H, W\).*got \(3, 4\)"):
        Normalized(nn.Identity(), 0.5, 0.5)(torch.rand(3, 4))


def test_a_single_number_is_used_for_all_channels():
    images = torch.rand(2, 3, 4, 4)
    assert_matches(Normalized(nn.Identity(), 0.5, 0.25)(images), (images - 0.5) / 0.25, 1e-6)


def test_every_tracer_works():
    model, images = colored(), torch.rand(2, 3, 4, 4)
    functions = {
        "compile": torch.compile(model, backend="eager", fullgraph=True),
        "compile, dynamic sizes": torch.compile(model, backend="eager", fullgraph=True, dynamic=True),
        "make_fx": make_fx(model)(images),
        "symbolic": fx.symbolic_trace(model),
        "vmap": torch.vmap(model),
    }
    for function in functions.values():
        assert_matches(function(images), normalized(images), 1e-6)
    g = torch.func.grad(lambda x: model(x).sum())(images)
    assert_matches(g, (1 / torch.tensor(STD)).reshape(3, 1, 1).expand_as(images), 1e-6)
    with pytest.raises(ValueError, match=r"shape \(B, 3, H, W\)"):
        functions["symbolic"](images[:, :1])


@pytest.mark.parametrize("kind", [np.array, np.float32, torch.tensor, tuple])
def test_sequences_of_any_type(kind):
    model = Normalized(nn.Identity(), kind(MEAN), kind(STD))
    assert_matches(model(torch.full((1, 3, 2, 2), 0.8)), normalized(torch.full((1, 3, 2, 2), 0.8)), 1e-6)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.array, torch.tensor, Fraction])
def test_single_numbers_of_any_type(kind):
    model = Normalized(nn.Identity(), kind(0.5), kind(0.25))
    assert (model.mean.item(), model.std.item()) == (0.5, 0.25)
    with pytest.raises(ValueError, match="std must be positive"):
        Normalized(nn.Identity(), kind(0.5), kind(0))


@pytest.mark.parametrize("mean", [127.5, -0.1, [0.5, 0.5, 1.01]])
def test_a_mean_or_std_outside_of_pixel_units_is_refused(mean):
    with pytest.raises(ValueError, match=r"mean must be in \[0, 1\], .*; got .*; divide mean and std of bytes by 255"):
        Normalized(nn.Identity(), mean, 0.5 if isinstance(mean, float) else [0.5] * 3)
    with pytest.raises(ValueError, match=r"std must be at most 1, .* divide mean and std of bytes by 255"):
        Normalized(nn.Identity(), 0.0, 255.0)
    model = Normalized(nn.Identity(), [0.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"images must be floating-point .*; got torch.uint8; use images.float\(\) / 255"):
        model(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))


@pytest.mark.parametrize("std", [torch.ones(2, 2), 10**400, [0.5, "a"], nn.Identity])
def test_what_is_no_number_per_channel_is_refused_on_one_line(std):
    with pytest.raises(ValueError, match=r"^std must be one finite number per channel; got [^\n]*; for instance"):
        Normalized(nn.Identity(), 0.5, std)
    with pytest.raises(ValueError, match=r"images must be a tensor \(B, C, H, W\); got list; convert"):
        Normalized(nn.Identity(), 0.5, 0.5)([[0.5]])


def test_units_are_the_distinct_stds_inside_a_model():
    def members(*stds):
        return nn.ModuleList(Normalized(nn.Identity(), len(std) * [index / len(stds)], std) for index, std in enumerate(stds))

    alike, other = members(STD, [0.25], [0.25, 0.25, 0.25]), members([0.25], STD, [0.1], STD)
    assert find_units(nn.Identity()) == []
    assert find_units(alike[0]) == [alike[0]]
    assert find_units(alike) == [alike[0], alike[1]]  # one number for all channels equals three equal numbers
    assert find_units(other) == [other[0], other[1], other[2]]
