"""Errors of a network as rows have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments import error_rates
from wassersmooth.study.data import Part
from wassersmooth.study.measured_rows import unpacked


def test_an_error_has_its_interval_and_which_images_are_wrong() -> None:
    wrong = torch.tensor([True, False, False, True, False, False, False, False, True, False])
    with_images: dict[str, Any] = {"errors": {}, "images": {}, "intervals": {}, "wrong": {}}
    without: dict[str, Any] = {"errors": {}, "images": {}, "intervals": {}}
    for row in (with_images, without):
        error_rates.add_error(row, "clean", wrong)
        low, high = row["intervals"]["clean"]
        assert (row["errors"], row["images"]) == ({"clean": 30.0}, {"clean": 10})
        assert low < 30 < high
    assert unpacked(with_images["wrong"]["clean"], 10).tolist() == wrong.int().tolist()
    assert "wrong" not in without


def test_images_are_moved_less_than_they_are_large() -> None:
    """The network answers with the brightest row or column, so that every shift along that axis is another answer."""

    class Brightest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.amax((1, 2))

    images = torch.zeros(2, 1, 3, 8)
    images[:, :, :, 4] = 1
    with error_rates.measuring(Brightest(), Part(images, torch.tensor([4, 0]))) as found:
        assert sorted(found.misclassified("clean", error_rates.as_they_are).tolist()) == [False, True]
        flips = {axis: found.collect(axis, error_rates.flips(found.model, axis, 20)) for axis in ("horizontal", "vertical")}  # type: ignore[arg-type]
    assert (flips["horizontal"] > 5).all()
    assert not flips["vertical"].any()
