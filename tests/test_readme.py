"""What the README shows must run, and CI must run what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dsv41ops
from dsv41ops.layouts import RECORDS
from dsv41ops.schemas import SCHEMAS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert sum(1 for line in example.splitlines() if line) <= 14  # twelve and the imports
    exec(compile(example, "README.md", "exec"), {})
    printed = "[72, 0, 1, 2] [9, 1, 2, 3] torch.Size([4, 8, 512]) torch.Size([4, 8])\n"
    assert capsys.readouterr().out == printed


def test_ci_runs_the_test_command() -> None:
    commands = re.findall(r"^    (python .*)$", README, re.M)
    assert commands == [
        "python -m pip install -e . && python -m graphs.decode",
        "python -m pip install -e '.[test]' && python -m pytest",
    ]
    assert commands[1] in (ROOT / ".ci/run").read_text()


def test_support_table_names_every_op_and_record() -> None:
    for op in SCHEMAS:
        assert f"`{op.removesuffix('_out')}`" in README
        assert hasattr(dsv41ops, op)
    for record in RECORDS:
        assert f"`{record.name}`" in README


def test_links_exist() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"
