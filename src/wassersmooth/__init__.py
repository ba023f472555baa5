"""Wasserstein smoothness for PyTorch."""

from wassersmooth import _interrupt as _interrupt
from wassersmooth.geometry import calculus as calculus
from wassersmooth.geometry import transport as transport
from wassersmooth.geometry.coherent_motion import Deformations as Deformations
from wassersmooth.geometry.graph import PixelGraph as PixelGraph
from wassersmooth.geometry.ground_metric import GroundFit as GroundFit
from wassersmooth.geometry.ground_metric import GroundScore as GroundScore
from wassersmooth.geometry.ground_metric import fit_ground_metric as fit_ground_metric
from wassersmooth.geometry.metrics import Euclidean as Euclidean
from wassersmooth.geometry.metrics import Wasserstein as Wasserstein
from wassersmooth.learning import engines as engines
from wassersmooth.learning.compiled.fast_gradients import FastGradients as FastGradients
from wassersmooth.learning.covector_norms import DualNorm as DualNorm
from wassersmooth.learning.doctor import doctor as doctor
from wassersmooth.learning.gradient_objective import GradientObjective as GradientObjective
from wassersmooth.learning.objective import Terms as Terms
from wassersmooth.learning.objectives import AdversarialTraining as AdversarialTraining
from wassersmooth.learning.objectives import DirectionalPenalty as DirectionalPenalty
from wassersmooth.learning.objectives import GradientPenalty as GradientPenalty
from wassersmooth.learning.objectives import NoisyInputs as NoisyInputs
from wassersmooth.learning.objectives import Plain as Plain
from wassersmooth.learning.suggestion import suggest_eta as suggest_eta
from wassersmooth.learning.tikhonov import Tikhonov as Tikhonov
from wassersmooth.normalized import Normalized as Normalized
from wassersmooth.robustness import attacks as attacks
from wassersmooth.robustness import variations as variations
from wassersmooth.robustness.certificates import Certificates as Certificates
from wassersmooth.robustness.certificates import certify as certify
from wassersmooth.robustness.evaluation import evaluate as evaluate
from wassersmooth.robustness.report import Report as Report
from wassersmooth.robustness.smoothing import Smoothed as Smoothed

__version__ = "0.2.0"
