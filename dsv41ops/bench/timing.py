"""Time per call inside a captured CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

WARM_UP_REPLAYS = 3
REPLAYS = 20
# Read between replays: evicts L2, and takes the GPU longer than the CPU takes to launch a graph,
# so that no launch is waited for inside the timed part.
FLUSH_BYTES = 2**30


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median replay, the fastest and the slowest."""

    us: float
    fastest_us: float
    slowest_us: float


def time_calls(run: Callable[[int], Any], calls: int, warm: Sequence[Tensor] = ()) -> Timing:
    """Capture ``run(0) .. run(calls - 1)`` and replay it with cold caches but for ``warm``."""
    run(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    for _ in range(WARM_UP_REPLAYS):
        graph.replay()
    times = time_region(graph.replay, REPLAYS, before=lambda: _evict(warm))
    return summarise([time / calls for time in times])


def time_region(
    run: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """Microseconds of each ``run()``, between device events; ``before()`` is not counted."""
    events = []
    for _ in range(repeats):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def summarise(times: Sequence[float]) -> Timing:
    return Timing(statistics.median(times), min(times), max(times))


@cache
def _flush_buffer(device: int) -> Tensor:
    return torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)


def _evict(warm: Sequence[Tensor]) -> None:
    _flush_buffer(torch.cuda.current_device()).sum()
    for tensor in warm:
        tensor.sum()
