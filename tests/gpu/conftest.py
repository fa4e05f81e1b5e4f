"""What tests for GPUs work with: under ``tasp-lab gpu-check`` what it checks, else the GPU that there is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from runtime.ranks.watch import CheckedGroup
from tasp_lab.prediction.inputs import wires
from tasp_lab.validation.gpu_check import Check, Session
from tests.gpu.sizes import FULL, HOST, QUICK, Sizes


def session_of(config: pytest.Config) -> Session | None:
    """The check that has started pytest."""
    return next((each for each in config.pluginmanager.get_plugins() if isinstance(each, Session)), None)


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("gpu: needs a GPU", "timeout: of pytest-timeout, where it is loaded"):
        config.addinivalue_line("markers", marker)


@pytest.fixture(scope="session")
def check(pytestconfig: pytest.Config) -> Check:
    if session := session_of(pytestconfig):
        return session.check
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return Check(torch.device("cuda"), wires("full-mesh:4"), quick=True)


@pytest.fixture
def numbers(pytestconfig: pytest.Config) -> dict[str, object]:
    """What a test has measured, for the record."""
    session = session_of(pytestconfig)
    return {} if session is None else session.numbers


@pytest.fixture(scope="session")
def group(check: Check) -> CheckedGroup:
    if check.group is None:
        pytest.skip("needs ranks: torchrun --nproc-per-node N -m tasp_lab.cli gpu-check")
    return check.group


@pytest.fixture
def several(group: CheckedGroup) -> CheckedGroup:
    """A group of ranks that send messages."""
    if group.world_size < 2:
        pytest.skip("needs 2 ranks")
    return group


@pytest.fixture
def gpu(check: Check) -> torch.device:
    if not check.on_gpu:
        pytest.skip("needs a GPU")
    return check.device


@pytest.fixture
def sizes(check: Check) -> Sizes:
    return (QUICK if check.quick else FULL) if check.on_gpu else HOST


@pytest.fixture(scope="session")
def ceilings() -> Mapping[tuple[str, int], float]:
    """The library's own times in seconds by operation and size, once the test of the library has measured them."""
    return {}
