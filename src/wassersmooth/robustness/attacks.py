"""All attacks, as ``wassersmooth.attacks.FGSM(8/255)``."""

from wassersmooth.robustness.attack_base import Attack as Attack
from wassersmooth.robustness.autoattack import AutoAttack as AutoAttack
from wassersmooth.robustness.pixel_attacks import FGSM as FGSM
from wassersmooth.robustness.pixel_attacks import IFGSM as IFGSM
from wassersmooth.robustness.pixel_attacks import PGD as PGD
from wassersmooth.robustness.pixel_attacks import MultiTargetedPGD as MultiTargetedPGD
from wassersmooth.robustness.square import Square as Square
from wassersmooth.robustness.transport_attacks import WassersteinFGSM as WassersteinFGSM
from wassersmooth.robustness.transport_attacks import WassersteinPGD as WassersteinPGD
