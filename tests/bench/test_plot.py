"""The picture, and what is said without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dsv41ops.bench import plot
from tests.bench.runs import made_up_run


@pytest.mark.parametrize("flash_mla", [True, False])
def test_writes_a_png(flash_mla: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    plot.save(made_up_run(flash_mla), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"python -m pip install 'dsv41ops\[plot\]'"):
        plot.require_matplotlib()
