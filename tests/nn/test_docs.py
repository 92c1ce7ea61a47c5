"""The example of docs/nn.md runs, and the package loads what the page says."""

from __future__ import annotations

import re

import pytest

from tests.export.fresh import run_fresh
from tests.test_readme import ROOT

IMPORT = """
import sys, torch
import dsv41ops
assert "dsv41ops.nn" not in sys.modules
before = set(sys.modules)
import dsv41ops.nn
loaded = set(sys.modules) - before
assert all(name.startswith("dsv41ops.nn") for name in loaded), loaded
"""


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/nn.md").read_text(), re.S)
    exec(compile(example, "docs/nn.md", "exec"), {})
    names = [f"attn.1.compressor.{name}.weight" for name in ("wkv", "wgate", "norm")]
    assert capsys.readouterr().out == f"torch.Size([5, 64]) {names}\n"


def test_loads_nothing_else() -> None:
    done = run_fresh(IMPORT)
    assert done.returncode == 0, done.stderr
