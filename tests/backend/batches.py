"""Batches for the builders, with what the tests check them against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate

import torch
from torch import Tensor

from dsv41ops.backend import CommonAttentionMetadata
from tests import oracles

PAGES = 12  # per request


def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    padding: int = 0,
    pages: int = PAGES,
    device: torch.device | str = "cpu",
    causal: bool = True,
    slot_mapping: Sequence[int] | None = None,
    **options: Tensor,
) -> CommonAttentionMetadata:
    """A batch of distinct random pages; ``padding`` tokens follow the real ones.

    The block table is a slice of a wider one, as engines have them, and the slots of the real
    tokens are arbitrary non-negative numbers.
    """
    starts = ints([0, *accumulate(query_lens)])
    num_reqs, num_actual = len(query_lens), sum(query_lens)
    numbers = torch.randperm(2 * num_reqs * pages + 1)[: num_reqs * pages].to(torch.int32)
    storage = torch.full((num_reqs, pages + 3), 9, dtype=torch.int32)
    storage[:, :pages] = numbers.view(num_reqs, pages)
    if slot_mapping is None:
        slot_mapping = [*range(100, 100 + num_actual), *[-1] * padding]
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=ints(seq_lens).to(device),
        num_reqs=num_reqs,
        num_actual_tokens=num_actual,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        block_table_tensor=storage.to(device)[:, :pages],
        slot_mapping=ints(slot_mapping, torch.int64).to(device),
        causal=causal,
        query_start_loc_cpu=starts.clone(),
        **options,
    )


# Name -> query lengths, lengths after the step, padding tokens.
BATCHES: dict[str, tuple[list[int], list[int], int]] = {
    "decodes": ([1, 1, 1], [40, 1, 17], 0),
    "mixed": ([1, 3, 9], [40, 21, 9], 3),
    "empty-request-in-the-middle": ([1, 0, 3], [5, 0, 9], 2),
    "padded-requests": ([2, 5, 0, 0], [12, 5, 0, 0], 4),
    "dummy-request": ([1, 3], [9, 1], 1),  # three queries of a request of length 1: positions < 0
    "all-padding": ([0, 0], [0, 0], 5),
    "no-requests": ([], [], 3),
    "nothing": ([], [], 0),
    "full": ([12, 20], [12, 63], 0),
}


def tensors_of(batch: CommonAttentionMetadata) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def whole_storage(tensor: Tensor) -> Tensor:
    """A copy of every byte behind a tensor, also of those that a slice skips."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage()).cpu().clone()


def expected_requests(batch: CommonAttentionMetadata, num_tokens: int) -> list[int]:
    return oracles.token_to_request(batch.query_start_loc.tolist(), num_tokens)


def expected_slots(
    batch: CommonAttentionMetadata,
    num_tokens: int,
    states_per_page: int,
    ratio: int,
    shard: oracles.Shard = oracles.ONE_RANK,
    slot_mapping: Sequence[int] | None = None,
) -> list[int]:
    return oracles.compressed_slot_mapping(
        batch.query_start_loc.tolist(),
        batch.seq_lens.tolist(),
        batch.block_table_tensor.tolist(),
        num_tokens,
        states_per_page,
        ratio,
        slot_mapping,
        shard,
    )
