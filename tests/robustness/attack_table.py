"""Every attack once, with settings small enough for tests; reprs double as test ids."""

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD, Attack, MultiTargetedPGD, Square, WassersteinFGSM, WassersteinPGD

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))

LINF = [
    FGSM(32 / 255),
    IFGSM(32 / 255, 8 / 255, 5),
    PGD(32 / 255, 8 / 255, 5),
    PGD(32 / 255, 8 / 255, 5, random_start=False, loss="margin"),
    PGD(32 / 255, 8 / 255, 3, restarts=3),
    MultiTargetedPGD(32 / 255, 8 / 255, 3, targets=2),
    Square(32 / 255, queries=60),
]
L2 = [
    PGD(0.8, 0.2, 5, norm="l2"),
    PGD(0.8, 0.3, 3, norm="l2", restarts=2, loss="margin"),
    Square(0.8, queries=60, norm="l2"),
]
TRANSPORT = [WassersteinFGSM(METRIC, 0.8), WassersteinPGD(METRIC, 0.8, 5), WassersteinPGD(METRIC, 0.8, 5, loss="margin")]
NORMALIZED = [FGSM(32 / 255, "normalized"), IFGSM(32 / 255, 8 / 255, 5, "normalized")]
ALL: list[Attack] = [*LINF, *L2, *TRANSPORT, *NORMALIZED]
