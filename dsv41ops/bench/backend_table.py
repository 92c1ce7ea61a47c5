"""The measured table by which ``auto`` chooses a backend: ``dsv41ops/backend_table.json``."""

from __future__ import annotations

import json
from dataclasses import replace

from dsv41ops.bench.results import BenchRun, DecodeResult


def with_fastest(run: BenchRun) -> BenchRun:
    """The run as if its own table had been in use."""
    decode = [replace(result, choice=result.fastest) for result in run.decode]
    return replace(run, decode=decode)


def render(run: BenchRun) -> str:
    """A line per problem: records, heads, tokens and the microseconds of every backend."""
    head = {
        "command": run.command,
        "gpu": run.gpu,
        "torch": run.torch,
        "triton": run.triton,
        "flash_mla": run.flash_mla,
        "capability": run.capability,
    }
    lines = ["{", *(f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items())]
    rows = ",\n  ".join(json.dumps(_row(result)) for result in run.decode)
    return "\n".join([*lines, ' "us": [', f"  {rows}", " ]", "}", ""])


def _row(result: DecodeResult) -> list[object]:
    case = result.case
    us = {backend: round(timing.us, 2) for backend, timing in result.times.items()}
    return [f"{case.window_record}+{case.record}", case.num_heads, case.num_tokens, us]
