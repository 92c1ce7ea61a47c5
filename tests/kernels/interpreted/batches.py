"""Batch geometry for the index kernels: ordinary, padded and hostile."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support import assert_same_bits, ints

CPU = torch.device("cpu")
FAR = 2**31 - 1


@dataclass(frozen=True)
class Batch:
    """Starts, lengths and number of tokens of a step, and block tables for it."""

    starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_tokens: int

    def geometry(self) -> tuple[Tensor, Tensor]:
        return ints(self.starts, CPU), ints(self.seq_lens, CPU)

    def table(self, columns: int = 7, rows: int | None = None) -> Tensor:
        """Pages with holes; what lies around the table would be valid pages of some row."""
        rows = len(self.seq_lens) if rows is None else rows
        storage = torch.full((rows + 1, columns + 3), 9, dtype=torch.int32)
        table = storage[:rows, 1 : columns + 1]
        table.copy_(torch.randint(-1, 12, table.shape, dtype=torch.int32))
        return table


BATCHES = [
    pytest.param(Batch((0, 1, 2, 3), (5, 40, 17), 3), id="decodes"),
    pytest.param(Batch((0, 8, 9, 12), (40, 1, 90), 12), id="mixed"),
    pytest.param(Batch((0, 1, 1, 4, 4, 4), (5, 0, 9, 0, 0), 6), id="empty and padded requests"),
    pytest.param(Batch((2, 3, 7), (4, 9), 9), id="tokens before the first request"),
    pytest.param(Batch((0, 5, 9), (3, -4), 9), id="positions below 0"),
    pytest.param(Batch((0, 2, 3), (FAR, -(2**31)), 4), id="extreme lengths"),
    pytest.param(Batch((0,), (), 3), id="no request"),
    pytest.param(Batch((0, 4), (4,), 0), id="no token"),
    pytest.param(Batch((0, 50), (60,), 9), id="fewer tokens than the last start"),
    pytest.param(
        Batch(tuple(i // 27 for i in range(301)), tuple(i % 50 for i in range(300)), 12),
        id="many requests",
    ),
]


def guarded(rows: int, width: int | None = None, dtype: torch.dtype = torch.int32) -> Tensor:
    """A caller's buffer of sevens inside a bigger one, at an odd offset."""
    if width is None:
        return torch.full((rows + 2,), 7, dtype=dtype)[1:-1]
    return torch.full((rows + 2, width + 5), 7, dtype=dtype)[1:-1, 3 : width + 3]


def assert_guards_intact(buffer: Tensor) -> None:
    base = buffer._base
    assert base is not None
    outside = base.clone()
    outside.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset()).fill_(7)
    assert bool((outside == 7).all())


def assert_padded(buffer: Tensor, expected: Tensor, padding: int) -> None:
    """``expected`` in the first rows, ``padding`` in the others, nothing written around them."""
    assert_same_bits(buffer[: len(expected)], expected)
    assert bool((buffer[len(expected) :] == padding).all())
    assert_guards_intact(buffer)
