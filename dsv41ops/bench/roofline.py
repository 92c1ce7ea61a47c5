"""What this GPU reaches: copy bandwidth and a bf16 matrix product, measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv41ops.bench.problems import Work
from dsv41ops.bench.timing import time_region

COPY_BYTES = 2**32
MATMUL_SIZE = 8192
WARM_UP = 3
REPEATS = 10


@dataclass(frozen=True)
class Roofline:
    """Bytes per second, read and written; and floating-point operations per second."""

    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, work: Work) -> float:
        """The time that no kernel is much faster than."""
        memory, compute = work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s
        return 1e6 * max(memory, compute)


def measure(device: torch.device) -> Roofline:
    return Roofline(
        bytes_per_s=copy_bandwidth(device),
        flops_per_s=2e6 * MATMUL_SIZE**3 / _matmul_us(device),
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2e6 * COPY_BYTES / _median_us(lambda: target.copy_(source))


def _matmul_us(device: torch.device) -> float:
    size = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    return _median_us(lambda: torch.mm(a, b, out=product))


def _median_us(run: Callable[[], Any]) -> float:
    time_region(run, WARM_UP)
    return statistics.median(time_region(run, REPEATS))
