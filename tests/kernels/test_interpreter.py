"""The Triton kernels on CPU tensors, in Triton's interpreter.

A process of its own: a kernel is interpreted or compiled for as long as its module lives.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
# These take as long as all others: both together keep two cores busy.
HALF = [
    str(FOLDER / f"test_{op}.py")
    for op in ("sparse_mla_decode", "merge_topk", "rope_kv_cache_insert")
]


def older(package: str, version: tuple[int, int]) -> bool:
    return tuple(int(part) for part in metadata.version(package).split(".")[:2]) < version


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None
    and older("triton", (3, 9))
    and not older("numpy", (2, 4)),
    reason="before Triton 3.9 the interpreter's loops need numpy < 2.4",
)
def test_interpreted() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *selected],
            cwd=FOLDER.parents[2],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for selected in (HALF, [str(FOLDER), *(f"--ignore={path}" for path in HALF)])
    ]
    outputs = [run.communicate(timeout=600)[0] for run in runs]
    for run, output in zip(runs, outputs, strict=True):
        assert run.returncode == 0, output[-8000:]
