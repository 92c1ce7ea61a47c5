"""How many states of a request a DCP rank holds (C18)."""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from tests import oracles
from tests.oracles import Shard
from tests.support import ints

CASES = [  # (states, world, interleave, per rank)
    (11, 2, 1, [6, 5]),
    (11, 2, 4, [7, 4]),
    (15, 2, 1, [8, 7]),
    (15, 2, 4, [8, 7]),
    (1, 4, 4, [1, 0, 0, 0]),
    (0, 4, 4, [0, 0, 0, 0]),
    (16, 4, 4, [4, 4, 4, 4]),
]


@pytest.mark.parametrize(("states", "world", "interleave", "expected"), CASES)
@pytest.mark.parametrize("ratio", [1, 2, 128])
def test_c18_cases(
    states: int, world: int, interleave: int, expected: list[int], ratio: int, device: torch.device
) -> None:
    # An open state, one token short, does not count.
    seq_lens = ints([states * ratio, states * ratio + ratio - 1], device)
    for rank, count in enumerate(expected):
        local = dsv41ops.dcp_local_seq_lens(seq_lens, ratio, world, rank, interleave)
        assert local.dtype == torch.int32
        assert local.tolist() == [count, count]


@pytest.mark.parametrize("interleave", [1, 2, 4, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_c18_ranks_share_every_state(world: int, interleave: int, device: torch.device) -> None:
    lengths = list(range(301))
    total = torch.zeros(301, dtype=torch.int64)
    for shard in Shard(world, 0, interleave).ranks():
        local = dsv41ops.dcp_local_seq_lens(
            ints(lengths, device), 1, shard.world, shard.rank, shard.interleave
        )
        assert local.tolist() == oracles.dcp_local_seq_lens(lengths, 1, shard)
        total += local.cpu()
    assert total.tolist() == lengths


def test_lengths_are_never_negative(device: torch.device) -> None:
    seq_lens = ints([-1, -5, -(2**31)], device)
    for rank in range(4):
        assert dsv41ops.dcp_local_seq_lens(seq_lens, 2, 4, rank, 4).tolist() == [0, 0, 0]
    assert dsv41ops.dcp_local_seq_lens(seq_lens, 1, 1, 0).tolist() == [0, 0, 0]


def test_the_longest_length_does_not_overflow(device: torch.device) -> None:
    longest = 2**31 - 1
    seq_lens = ints([longest], device)
    counts = [dsv41ops.dcp_local_seq_lens(seq_lens, 1, 4, rank, 2**30).item() for rank in range(4)]
    assert counts == [2**30, 2**30 - 1, 0, 0]
    assert dsv41ops.dcp_local_seq_lens(seq_lens, 1, 1, 0, 2**30).item() == longest


def test_one_rank_returns_its_own_tensor(device: torch.device) -> None:
    seq_lens = ints([3, 4], device)
    assert dsv41ops.dcp_local_seq_lens(seq_lens, 1, 1, 0).data_ptr() != seq_lens.data_ptr()
