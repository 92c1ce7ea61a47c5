"""The example of docs/backend.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "backend.md"


def test_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(PAGE), "exec"), {})
