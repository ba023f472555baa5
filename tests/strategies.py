"""Hypothesis strategies for operators of every kind, each with its oracle."""

from hypothesis import strategies as st

from tests.operator_case import OperatorCase

seeds = st.integers(0, 2**16)


@st.composite
def operator_cases(
    draw: st.DrawFn, *, mass: st.SearchStrategy[float] | None = None, uniform: st.SearchStrategy[bool] | None = None
) -> OperatorCase:
    """Grids of every kind on small images, single rows included, and lines and islands; the radius may exceed the image."""
    height, width = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)).filter(lambda size: size != (1, 1)))
    layout = draw(st.sampled_from(["grid", "grid", *["line"] * (width > 1), *["islands"] * (height * width > 3)]))
    return OperatorCase(
        height=height,
        width=width,
        radius=draw(st.integers(1, 8)),
        neighborhood=draw(st.sampled_from(["square", "disk"])),
        weight=draw(st.sampled_from(["constant", "tensor", *["gaussian", "function"] * (layout != "islands")])),
        channels=draw(st.integers(1, 3)),
        batch=draw(st.integers(1, 3)),
        dark=draw(st.sampled_from(["none", "scattered", "half"])),
        scale=draw(st.sampled_from(["unit", "paper"])),
        mass=draw(st.sampled_from([0.0, 0.25, 3.0]) if mass is None else mass),
        uniform=draw(st.booleans() if uniform is None else uniform),
        layout=layout,
        seed=draw(seeds),
    )


def conserving_cases() -> st.SearchStrategy[OperatorCase]:
    """Without a mass term: constants are in the kernel, and the mass of every channel is conserved."""
    return operator_cases(mass=st.just(0.0))


def creating_cases() -> st.SearchStrategy[OperatorCase]:
    """With a mass term: mass may appear and vanish."""
    return operator_cases(mass=st.sampled_from([0.25, 3.0]))
