"""Every kernel compiles for the GPUs we ship for, within their limits; no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

SHARED_LIMITS = {90: 232448, 100: 232448, 120: 101376}
TENSOR_MEMORY_COLUMNS = 512
# A word or two of the start that the end of a program needs again; a loop's values are far more.
SPILL_LIMIT = 16
# Its registers are capped, so that two programs fit an SM: some of what every chunk of states needs
# lies in memory while the chunk's tiles are scored.
SPILL_LIMITS = {"_indexer_scores_kernel": 80}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    arches = [str(arch) for arch in SHARED_LIMITS]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cross_compile", *arches],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_compiles_within_limits(arch: int, reports: list[dict[str, Any]]) -> None:
    mine = [report for report in reports if report["arch"] == arch]
    assert "_sparse_mla_decode_kernel" in {report["kernel"] for report in mine}
    failed = [report for report in mine if "error" in report]
    assert not failed, failed[0]["error"]
    for report in mine:
        assert report["shared"] <= SHARED_LIMITS[arch], report
        assert report["tmem"] <= TENSOR_MEMORY_COLUMNS, report


def test_no_spills_on_sm90(reports: list[dict[str, Any]]) -> None:
    """In no loop. Byte-wise variants, for tensors off 16-byte boundaries, only have to be right."""
    spilling = [
        report
        for report in reports
        if report["arch"] == 90
        and report["aligned"]
        and report["spill_stores"] > SPILL_LIMITS.get(report["kernel"], SPILL_LIMIT)
    ]
    assert not spilling
