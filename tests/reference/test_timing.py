"""The reference is vectorised: bounds far above what it takes, far below what a loop would."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import dsv41ops
from tests.support import HEAD_DIM, ints, random_cache

CPU = torch.device("cpu")


def takes_less_than(seconds: float, call: Callable[[], object]) -> bool:
    """One run out of ten is enough: what other work on the machine costs is not the op's."""
    for _ in range(10):
        start = time.perf_counter()
        call()
        if time.perf_counter() - start < seconds:
            return True
    return False


def prompt_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4096 tokens: 64 requests of 64 query tokens each, at long contexts."""
    table = torch.randint(100_000, (64, 256), dtype=torch.int32)
    return ints(range(0, 4097, 64), CPU), torch.randint(64, 8000, (64,), dtype=torch.int32), table


@pytest.mark.usefixtures("one_thread")
def test_slot_mapping_of_4096_tokens() -> None:
    batch = prompt_batch()
    assert takes_less_than(0.02, lambda: dsv41ops.compressed_slot_mapping(*batch, 4096, 32, 2))


@pytest.mark.usefixtures("one_thread")
def test_index_rows_of_4096_tokens() -> None:
    batch = prompt_batch()
    topk = torch.randint(4000, (4096, 128), dtype=torch.int32)
    assert takes_less_than(1, lambda: dsv41ops.topk_to_slots(topk, *batch, 32, 2))
    assert takes_less_than(1, lambda: dsv41ops.sliding_window_indices(*batch, 4096, 32))


def test_decode_of_64_tokens_64_heads_640_rows() -> None:
    window = random_cache("mxfp8", 64, 32, CPU)
    cache = random_cache("nvfp4", 64, 64, CPU)
    q = torch.randn(64, 64, HEAD_DIM).bfloat16()

    def rows(width: int, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.randint(pool.shape[0] * pool.shape[1], (64, width), dtype=torch.int32)
        return indices, torch.full((64,), width, dtype=torch.int32)

    arguments = window, *rows(128, window), cache, *rows(512, cache)
    assert takes_less_than(2, lambda: dsv41ops.sparse_mla_decode(q, *arguments))
