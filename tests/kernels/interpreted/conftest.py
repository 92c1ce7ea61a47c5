"""Collected only where Triton interprets: ``tests/kernels/test_interpreter.py`` starts that."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # numpy warns of infinities and NaNs, which are meant.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.*")


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The tensors are small."""
