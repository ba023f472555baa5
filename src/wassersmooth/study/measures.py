"""The table of measures: what the keys of an evaluation are called on pages, in plots, in sentences and on the screen.

A key is the attack or variation with its size and its units: ``pgd20_margin_8_pixel``. The table has one entry for each attack
or variation, and the titles of a measure are made of that entry and of the parts of the key. What a measure does to the images
is in :mod:`wassersmooth.robustness.suites`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from wassersmooth.robustness.suites import CLEAN as CLEAN
from wassersmooth.robustness.summary import DISPLACEMENT
from wassersmooth.study.tables import NBSP

UNITS = {
    "pixel": "pixels are 0 to 1, attacked images stay in that range",
    "normalized": "after the network's normalization, not clipped: probably the paper's protocol",
}
PREDICTED_UNITS = "normalized_predicted"
PREDICTED_NOTE = (
    "led away from the network's own answer in place of the label: nearest to the paper's numbers without a penalty"
)
SHORT_UNITS = {"pixel": "px", "normalized": "norm", "shift": "shift"}


@dataclass(frozen=True)
class Wording:
    """What the measures of one attack or variation are called.

    Attributes:
        title: in tables and plots, before the size.
        levels: whether the size is in 1/255.
        column: in a narrow column, if not the title.
        spoken: in a sentence, if not the title.
        threat: in a comparison of threats, where ``{}`` is the size; if not the title and the size.
    """

    title: str
    levels: bool = False
    column: str = ""
    spoken: str = ""
    threat: str = ""


TABLE = {
    "fgsm": Wording("FGSM", levels=True),
    "ifgsm10": Wording("I-FGSM-10", levels=True),
    "ifgsm20": Wording("I-FGSM-20", levels=True, column="I-FGSM"),
    "pgd20_margin": Wording(
        "PGD-20, margin loss,", levels=True, column="PGD", spoken="20 margin-loss PGD steps", threat="pixel {}"
    ),
    "multitargeted20": Wording(
        "PGD-20 towards several classes,", levels=True, column="MT PGD", threat="pixel {}, several targets"
    ),
    "autoattack": Wording("AutoAttack", levels=True, column="AutoA."),
    "pgd20_l2": Wording("PGD-20, L2 norm", column="L2 PGD", threat="L2 {}"),
    "wasserstein20": Wording("Wasserstein PGD-20", column="W PGD", threat="Wasserstein {}"),
    "noise": Wording("random ± noise", levels=True),
    "gaussian_noise": Wording("Gaussian noise, standard deviation"),
    "wasserstein_noise": Wording("Wasserstein noise, root mean square"),
    "elastic": Wording("elastic deformation, pixels:", threat="elastic {} px"),
    "rotation": Wording("rotation, degrees up to"),
    "scaling": Wording("scaling, factor up to"),
}


class _Parts(NamedTuple):
    wording: Wording
    size: str  # as a title has it: 8/255
    rest: list[str]  # the rest of the key: the size, and the units or the like


def _parts(key: str) -> _Parts | None:
    """The parts of a key; None if it is not in the table."""
    for stem in sorted(TABLE, key=len, reverse=True):
        if key.startswith(f"{stem}_"):
            rest = key.removeprefix(f"{stem}_").split("_")
            return _Parts(TABLE[stem], f"{rest[0]}/255" if TABLE[stem].levels else rest[0], rest)
    return None


def error_key(stem: str, units: str) -> str:
    """The key of ``fgsm_8`` in these units; a clean error has none."""
    return stem if stem == CLEAN else f"{stem}_{units}"


def attack_title(attack: str) -> str:
    """The title of an attack without size and units: ``I-FGSM-10`` for ``ifgsm10``."""
    return TABLE[attack].title if attack in TABLE else attack.upper()


def short_title(key: str, between: str) -> str:
    """Attack and size with words between them, without units: ``FGSM at 8/255``."""
    found = _parts(key)
    return "natural" if found is None else f"{found.wording.title}{between}{found.size}"


def table_title(key: str) -> str:
    """The title in a table whose heading names the units: ``FGSM ε = 8/255``."""
    return "Natural" if key == CLEAN else short_title(key, f" ε{NBSP}={NBSP}")


def full_title(key: str) -> str:
    """The title in a table of all measures, with units: ``PGD-20, margin loss, ε = 8/255, pixel units``."""
    found = _parts(key)
    if found is None:
        return key.replace("_", " ")
    if "shift" in found.rest:
        return f"{found.wording.title}, {found.size} {DISPLACEMENT}"
    if "unit" in found.rest:
        return f"{table_title(key)}, unit scale, radius {found.rest[-1].removeprefix('r')}"
    return f"{table_title(key)}, pixel units" if found.rest[-1] == "pixel" else f"{found.wording.title} {' '.join(found.rest)}"


def spoken(key: str) -> str:
    """The measure in a sentence: ``20 margin-loss PGD steps at 8/255 in pixel units``."""
    found = _parts(key)
    assert found is not None
    return f"{found.wording.spoken or found.wording.title} at {found.size} in {found.rest[-1]} units"


def column_title(key: str) -> str:
    """The title of a narrow column, on two lines: FGSM and ``8 px``."""
    found = _parts(key)
    if found is None:
        return key
    words = [found.rest[0], *(SHORT_UNITS[part] for part in found.rest if part in SHORT_UNITS)]
    return f"{found.wording.column or found.wording.title}\n{' '.join(words)}"


def threat_title(key: str) -> str:
    """The title in a comparison of threats: ``pixel 8/255``."""
    found = _parts(key)
    return key if found is None else found.wording.threat.format(found.size) or short_title(key, " ")
