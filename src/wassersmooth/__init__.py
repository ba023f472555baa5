"""Wasserstein smoothness for PyTorch."""

from wassersmooth.geometry.graph import PixelGraph as PixelGraph
from wassersmooth.geometry.metrics import Euclidean as Euclidean
from wassersmooth.geometry.metrics import Wasserstein as Wasserstein
