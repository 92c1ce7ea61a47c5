"""The decode/prompt split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv41ops.backend import DecodeSplit, split_decodes_and_prefills
from tests.backend.batches import make_batch


def split(query_lens: list[int], threshold: int, padding: int = 0) -> DecodeSplit:
    batch = make_batch(query_lens, [length + 50 for length in query_lens], padding=padding)
    return split_decodes_and_prefills(batch, threshold)


@pytest.mark.parametrize(
    ("query_lens", "threshold", "counts"),
    [
        ([1, 1, 1], 1, (3, 0, 3, 0)),
        ([1, 1, 2], 1, (2, 1, 2, 2)),
        ([2, 40], 1, (0, 2, 0, 42)),
        # Speculative decodes: up to 1 + num_speculative_tokens, of unequal lengths.
        ([4, 1, 3, 5, 100], 4, (3, 2, 8, 105)),
        ([4, 4], 4, (2, 0, 8, 0)),
        ([5], 4, (0, 1, 0, 5)),
        # Padded requests count where they stand.
        ([1, 1, 0, 0], 1, (4, 0, 2, 0)),
        ([1, 0, 9, 0], 1, (2, 2, 1, 9)),
        ([0, 0], 1, (2, 0, 0, 0)),
        ([], 1, (0, 0, 0, 0)),
        # A decode behind a prompt is counted with the prompts.
        ([1, 7, 1, 8], 1, (1, 3, 1, 16)),
        ([7, 1], 1, (0, 2, 0, 8)),
    ],
)
def test_counts(query_lens: list[int], threshold: int, counts: tuple[int, ...]) -> None:
    expected = DecodeSplit(*counts)
    assert split(query_lens, threshold) == expected
    assert split(query_lens, threshold, padding=6) == expected
    assert expected.num_decodes + expected.num_prefills == len(query_lens)
    assert expected.num_decode_tokens + expected.num_prefill_tokens == sum(query_lens)


def test_requests_past_num_reqs_do_not_count() -> None:
    """An engine's host buffer is longer than the batch and holds old numbers behind it."""
    batch = make_batch([1, 1, 9], [5, 5, 9])
    batch = replace(batch, query_start_loc_cpu=torch.tensor([0, 1, 2, 11, 0, 70]))
    assert split_decodes_and_prefills(batch, 1) == DecodeSplit(2, 1, 2, 9)


def test_without_the_host_copy() -> None:
    """``max_query_len`` alone proves a batch of decodes."""
    decodes = replace(make_batch([2, 1], [9, 9]), query_start_loc_cpu=None)
    assert split_decodes_and_prefills(decodes, 2) == DecodeSplit(2, 0, 3, 0)
    message = "query_start_loc_cpu: expected a CPU tensor, since max_query_len = 2 .* 1, got None"
    with pytest.raises(ValueError, match=message):
        split_decodes_and_prefills(decodes, 1)


def test_only_the_host_copy_is_read() -> None:
    """Meta tensors have no values: reading one would raise."""
    batch = make_batch([1, 6], [9, 9])
    batch = replace(
        batch,
        **{
            name: getattr(batch, name).to("meta")
            for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        },
    )
    assert split_decodes_and_prefills(batch, 1) == DecodeSplit(1, 1, 1, 6)


def test_host_copy_must_be_on_the_host() -> None:
    batch = make_batch([1], [9])
    batch = replace(batch, query_start_loc_cpu=batch.query_start_loc.to("meta"))
    message = "query_start_loc_cpu: expected a CPU tensor, got one on meta"
    with pytest.raises(ValueError, match=message):
        split_decodes_and_prefills(batch, 1)


def test_host_copy_too_short() -> None:
    batch = replace(make_batch([1, 1], [9, 9]), query_start_loc_cpu=torch.tensor([0, 1]))
    message = r"query_start_loc_cpu: expected at least num_reqs \+ 1 = 3 entries, got 2"
    with pytest.raises(ValueError, match=message):
        split_decodes_and_prefills(batch, 1)
