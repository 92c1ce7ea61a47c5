"""The kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from dsv41ops.kernels.triton.token_to_request import launch_token_to_request
from dsv41ops.reference.index import token_to_request
from tests.kernels.interpreted.batches import BATCHES, CPU, Batch
from tests.support import assert_same_bits, ints


@pytest.mark.parametrize("batch", BATCHES)
def test_requests(batch: Batch) -> None:
    starts, _ = batch.geometry()
    for num_tokens in (batch.num_tokens, 0, 1, 130):
        expected = token_to_request(starts, num_tokens)
        assert_same_bits(launch_token_to_request(starts, num_tokens), expected)


@pytest.mark.parametrize("num_requests", [1, 2, 127, 128, 511, 512, 1024, 1030])
def test_every_start_is_found(num_requests: int) -> None:
    lengths = torch.randint(3, (num_requests,))
    starts = ints([0, *lengths.cumsum(0).tolist()], CPU)
    num_tokens = int(starts[-1]) + 5
    expected = token_to_request(starts, num_tokens)
    assert_same_bits(launch_token_to_request(starts, num_tokens), expected)


def test_unordered_starts_read_nothing_outside() -> None:
    """Not a batch; but a stale buffer of a padded step must not send a read astray."""
    starts = ints([5, -3, 2**31 - 1, 0, -(2**31), 9, 9], CPU)
    request = launch_token_to_request(starts, 20)
    assert bool(((request >= -1) & (request < 6)).all())
