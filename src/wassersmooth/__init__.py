"""Wasserstein smoothness for PyTorch."""

from wassersmooth.geometry import calculus as calculus
from wassersmooth.geometry import transport as transport
from wassersmooth.geometry.graph import PixelGraph as PixelGraph
from wassersmooth.geometry.metrics import Euclidean as Euclidean
from wassersmooth.geometry.metrics import Wasserstein as Wasserstein
from wassersmooth.normalized import Normalized as Normalized
from wassersmooth.robustness import attacks as attacks
from wassersmooth.robustness import variations as variations
from wassersmooth.robustness.dossier import evaluate as evaluate
from wassersmooth.robustness.report import Report as Report
