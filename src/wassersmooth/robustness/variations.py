"""All natural variations of images, as ``wassersmooth.variations.translate(images, 3)``."""

from wassersmooth.robustness.corruptions import PARAMETERS as PARAMETERS
from wassersmooth.robustness.corruptions import corrupt as corrupt
from wassersmooth.robustness.deformations import elastic as elastic
from wassersmooth.robustness.deformations import rotate as rotate
from wassersmooth.robustness.deformations import scale as scale
from wassersmooth.robustness.noise import gaussian_noise as gaussian_noise
from wassersmooth.robustness.noise import metric_noise as metric_noise
from wassersmooth.robustness.noise import sign_noise as sign_noise
from wassersmooth.robustness.translations import label_flips as label_flips
from wassersmooth.robustness.translations import translate as translate
