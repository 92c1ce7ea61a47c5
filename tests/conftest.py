"""Devices, seeds and property-test settings shared by every test."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))

# Derandomised: a red run is red again. The fixtures in use (device, seed) are the same for every
# example, so sharing them between examples is meant.
settings.register_profile(
    "dsv41ops",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("dsv41ops")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device this machine can run the ops on."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Random inputs depend on the test's own id only, not on what ran before."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors, where a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
