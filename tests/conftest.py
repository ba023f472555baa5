"""Fixtures of the whole suite."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Some virtual machines list AMX among their instructions but cannot run it. oneDNN reads this at its first kernel.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Every process of `pytest -n` has its own torch; more threads than cores would only slow the small kernels down.
torch.set_num_threads(1)

# Machines in CI replay the same examples, so that a red build is about the change; a developer's machine keeps looking.
settings.register_profile(
    "default", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data-dir", help="where the files of CIFAR-10 are, for tests of the published networks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `pytest -m cuda` run all that needs a GPU, also kernels, whose tests run in an interpreter elsewhere."""
    for item in items:
        if uses_cuda(item):
            item.add_marker("cuda")


def uses_cuda(item: pytest.Item) -> bool:
    """By the parameters of a test, by the device of its module, or by the reason for which it is skipped without one."""
    parameters = getattr(item, "callspec", None)
    given = [] if parameters is None else [value for value in parameters.params.values() if isinstance(value, str)]
    reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")]
    of_module = getattr(getattr(item, "module", None), "DEVICE", None)
    return "cuda" in (*given, of_module) or any("CUDA" in reason or "GPU" in reason for reason in reasons)


@pytest.fixture
def cifar10(request: pytest.FixtureRequest) -> Path:
    """The folder of CIFAR-10, from --data-dir or WASSERSMOOTH_DATA_DIR; without it the test is skipped."""
    given = request.config.getoption("--data-dir") or os.environ.get("WASSERSMOOTH_DATA_DIR")
    if not given:
        pytest.skip("needs CIFAR-10: pytest --data-dir FOLDER, or WASSERSMOOTH_DATA_DIR")
    return Path(given)


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    """Whether tf32 is allowed is a setting of the process, which trainings change: each test leaves torch's defaults behind."""
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="session", params=_devices())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seeded(device: str) -> Callable[[int], torch.Generator]:
    """A maker of generators on the device of the test: `seeded(3)` twice gives the same numbers twice."""
    return lambda seed: torch.Generator(device=device).manual_seed(seed)


@pytest.fixture
def generator(seeded: Callable[[int], torch.Generator]) -> torch.Generator:
    return seeded(0)
