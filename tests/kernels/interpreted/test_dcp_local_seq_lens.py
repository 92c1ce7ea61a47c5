"""The kernel against the reference."""

from __future__ import annotations

import pytest

from dsv41ops.kernels.triton.dcp_local_seq_lens import launch_dcp_local_seq_lens
from dsv41ops.reference.index import dcp_local_seq_lens
from tests.kernels.interpreted.batches import CPU, FAR
from tests.support import assert_same_bits, ints

LENGTHS = [*range(200), -1, -(2**31), FAR - 1, FAR]


@pytest.mark.parametrize("ratio", [1, 2, 128, 2**31])
@pytest.mark.parametrize("interleave", [1, 4, 64, 2**31 - 1, 2**33])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_lengths(world: int, interleave: int, ratio: int) -> None:
    seq_lens = ints(LENGTHS, CPU)
    for rank in {0, world - 1}:
        arguments = (seq_lens, ratio, world, rank, interleave)
        assert_same_bits(launch_dcp_local_seq_lens(*arguments), dcp_local_seq_lens(*arguments))


def test_no_request() -> None:
    assert launch_dcp_local_seq_lens(ints([], CPU), 1, 2, 0, 1).shape == (0,)
