"""What a run measured, and the numbers that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv41ops.bench.problems import DecodeCase, OpCase, Work
from dsv41ops.bench.roofline import Roofline
from dsv41ops.bench.timing import Timing


@dataclass(frozen=True)
class DecodeResult:
    case: DecodeCase
    times: Mapping[str, Timing]  # of every backend that can serve the case
    choice: str  # of `auto`
    flash_mla_us: float | None  # FlashMLA's kernels by themselves

    @property
    def timing(self) -> Timing:
        """Of ``auto``."""
        return self.times[self.choice]

    @property
    def fastest(self) -> str:
        return min(self.times, key=lambda backend: self.times[backend].us)

    @property
    def ratio(self) -> float | None:
        """Our time over FlashMLA's; below 1 is faster."""
        return None if self.flash_mla_us is None else self.timing.us / self.flash_mla_us


@dataclass(frozen=True)
class OpResult:
    case: OpCase
    timing: Timing


def tflops(work: Work, us: float) -> float:
    return work.flops / us / 1e6


def gigabytes_per_s(work: Work, us: float) -> float:
    return work.num_bytes / us / 1e3


@dataclass
class BenchRun:
    """One run of the bench."""

    gpu: str
    capability: int  # major
    torch: str
    triton: str
    command: str
    roofline: Roofline
    launch: Timing  # of an empty kernel
    flash_mla: str  # its version, or why it was not run
    backends: Mapping[str, str | None]  # why one cannot serve here at all
    decode: list[DecodeResult] = field(default_factory=list)
    ops: list[OpResult] = field(default_factory=list)

    def share(self, work: Work, us: float) -> float:
        """Of the roofline: its floor over the time."""
        return self.roofline.floor_us(work) / us

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, times in microseconds."""
        return {
            "gpu": self.gpu,
            "torch": self.torch,
            "triton": self.triton,
            "command": self.command,
            "copy_gb_per_s": self.roofline.bytes_per_s / 1e9,
            "matmul_tflops": self.roofline.flops_per_s / 1e12,
            "empty_kernel_us": self.launch.us,
            "flash_mla": self.flash_mla,
            "backends": dict(self.backends),
            "sparse_mla_decode": [self._decode_row(result) for result in self.decode],
            "ops": [self._op_row(result) for result in self.ops],
        }

    def _decode_row(self, result: DecodeResult) -> dict[str, Any]:
        case = result.case
        return {
            "window_record": case.window_record,
            "record": case.record,
            "num_heads": case.num_heads,
            "num_tokens": case.num_tokens,
            **_times(result.timing),
            **self._rates(case.work, result.timing.us),
            "backend": result.choice,
            "backend_us": {backend: timing.us for backend, timing in result.times.items()},
            "flash_mla_us": result.flash_mla_us,
            "ratio": result.ratio,
        }

    def _op_row(self, result: OpResult) -> dict[str, Any]:
        case = result.case
        rates = self._rates(case.work, result.timing.us) if case.work else {}
        return {
            "op": case.op,
            "record": case.record,
            **({"context": case.context} if case.context else {}),
            case.letter: case.size,
            **_times(result.timing),
            **rates,
            "empty_kernels": result.timing.us / self.launch.us,
        }

    def _rates(self, work: Work, us: float) -> dict[str, float]:
        return {
            "tflops": tflops(work, us),
            "gb_per_s": gigabytes_per_s(work, us),
            "roofline_share": self.share(work, us),
        }


def _times(timing: Timing) -> dict[str, float]:
    return {
        "us": timing.us,
        "fastest_us": timing.fastest_us,
        "slowest_us": timing.slowest_us,
    }
