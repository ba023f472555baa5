"""Assertions about numerical results that report by how much they failed."""

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray

# Relative to the largest expected entry.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5}


def to_numpy(value: Tensor | Array | float) -> Array:
    if isinstance(value, Tensor):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value)


def relative_error(actual: Tensor | Array, expected: Tensor | Array, unit: float | None = None) -> float:
    """Largest error relative to the largest expected entry, or to `unit` if one is given."""
    a, e = to_numpy(actual), to_numpy(expected)
    assert a.shape == e.shape, f"shape {a.shape}, expected {e.shape}"
    assert np.isfinite(a).all(), f"{np.count_nonzero(~np.isfinite(a))} of {a.size} entries are not finite"
    unit = float(np.abs(e).max()) if unit is None else unit
    error = float(np.abs(a - e).max())
    return 0.0 if error == 0 else error / unit if unit > 0 else float("inf")


def assert_matches(actual: Tensor | Array, expected: Tensor | Array, rel: float, unit: float | None = None) -> None:
    error = relative_error(actual, expected, unit)
    assert error <= rel, f"relative error {error:.3g} exceeds {rel:.3g} (shape {to_numpy(actual).shape})"


def assert_each_matches(actual: Tensor | Array, expected: Tensor | Array, rel: float) -> None:
    """Compare per-image scalars, each relative to its own expected value, so that a bright image does not hide a dark one."""
    a, e = to_numpy(actual), to_numpy(expected)
    assert a.shape == e.shape, f"shape {a.shape}, expected {e.shape}"
    for x, y in zip(a.ravel(), e.ravel(), strict=True):
        assert_matches(np.asarray([x]), np.asarray([y]), rel)


def assert_within_standard_errors(
    actual: Tensor | Array, expected: Tensor | Array, standard_error: Tensor | Array, limit: float = 5.0
) -> None:
    """Check that every deviation is at most `limit` standard errors, and zero where the standard error is zero."""
    deviation = np.abs(to_numpy(actual) - to_numpy(expected))
    error = np.broadcast_to(to_numpy(standard_error), deviation.shape)
    assert np.isfinite(deviation).all()
    z = deviation / np.where(error > 0, error, 1e-300)
    assert z.max() <= limit, f"{z.max():.2f} standard errors away (limit {limit}), deviation {deviation.max():.3g}"
