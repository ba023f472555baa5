"""Wasserstein smoothness for PyTorch."""

from wassersmooth.geometry import calculus as calculus
from wassersmooth.geometry import transport as transport
from wassersmooth.geometry.graph import PixelGraph as PixelGraph
from wassersmooth.geometry.metrics import Euclidean as Euclidean
from wassersmooth.geometry.metrics import Wasserstein as Wasserstein
from wassersmooth.learning import engines as engines
from wassersmooth.learning.doctor import doctor as doctor
from wassersmooth.learning.dual_norm import DualNorm as DualNorm
from wassersmooth.learning.fast import FastGradients as FastGradients
from wassersmooth.learning.objectives import AdversarialTraining as AdversarialTraining
from wassersmooth.learning.objectives import DirectionalPenalty as DirectionalPenalty
from wassersmooth.learning.objectives import GradientPenalty as GradientPenalty
from wassersmooth.learning.objectives import NoisyInputs as NoisyInputs
from wassersmooth.learning.objectives import Plain as Plain
from wassersmooth.learning.terms import Terms as Terms
from wassersmooth.learning.tikhonov import Tikhonov as Tikhonov
from wassersmooth.normalized import Normalized as Normalized
from wassersmooth.robustness import attacks as attacks
from wassersmooth.robustness import variations as variations
from wassersmooth.robustness.dossier import evaluate as evaluate
from wassersmooth.robustness.report import Report as Report
from wassersmooth.version import __version__ as __version__
