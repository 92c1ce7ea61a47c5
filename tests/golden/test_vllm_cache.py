"""KV insert and gather against the bytes and values that vLLM's encoders and decoders recorded."""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from tests.golden.npz import Golden
from tests.support import assert_same_bits, decode_pool

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE_SIZE = 64


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("row_bytes", [584, 528])
def test_insert_reproduces_every_byte(
    row_bytes: int, slot_dtype: torch.dtype, device: torch.device
) -> None:
    golden = Golden("vllm_cache", device)
    recorded = golden.tensor(f"cache{row_bytes}")
    pages = torch.zeros_like(recorded)
    cache = pages.as_strided(
        (pages.shape[0], PAGE_SIZE, row_bytes), (pages.stride(0), row_bytes, 1)
    )
    dsv41ops.kv_cache_insert(golden.bf16("k"), golden.tensor("slot_mapping").to(slot_dtype), cache)
    assert_same_bits(pages, recorded)


@pytest.mark.parametrize("row_bytes", [584, 528, 288])
def test_gather_reproduces_every_value(row_bytes: int, device: torch.device) -> None:
    golden = Golden("vllm_cache", device)
    cache = golden.paged(f"cache{row_bytes}", PAGE_SIZE, row_bytes)
    recorded = golden.bf16(f"gathered{row_bytes}")[0]
    table = golden.lists("block_table")[0]
    slots = [page * PAGE_SIZE + row for page in table for row in range(PAGE_SIZE)]
    gathered = dsv41ops.kv_cache_gather(cache, torch.tensor(slots, device=device))
    # cache288 is random bytes, NaN scales among them: NaN is compared as NaN, not by its bits.
    torch.testing.assert_close(gathered, recorded, rtol=0, atol=0, equal_nan=True)
    number = ~torch.isnan(recorded)
    assert_same_bits(gathered[number], recorded[number])
    exact = decode_pool(cache)[slots].bfloat16().to(device)
    torch.testing.assert_close(recorded, exact, rtol=0, atol=0, equal_nan=True)


def test_nvfp4_insert_then_gather_is_stable(device: torch.device) -> None:
    """No nvfp4 encoder was recorded: what the decoder reads must encode to the same values.

    A group whose largest magnitude is 6 or 4 scale steps decides its own scale again; the others
    may pick a finer one, so only those groups are compared.
    """
    golden = Golden("vllm_cache", device)
    rows = golden.bf16("gathered288")[0]
    cache = dsv41ops.new_kv_cache(2, PAGE_SIZE, "nvfp4", device)
    slots = torch.arange(rows.shape[0], device=device)
    recorded = golden.tensor("cache288").view(-1, 288)
    table = golden.lists("block_table")[0]
    order = [page * PAGE_SIZE + row for page in table for row in range(PAGE_SIZE)]
    scales = recorded[order, 256:]
    data = recorded[order, :256].view(-1, 32, 8)
    has_six = (((data & 7) == 7) | ((data >> 4 & 7) == 7)).any(-1)
    ordinary = (scales >= 1) & (scales < 127) & has_six
    finite = torch.where(torch.isfinite(rows), rows, 0.0)
    dsv41ops.kv_cache_insert(finite, slots, cache)
    again = dsv41ops.kv_cache_gather(cache, slots)
    same = (again == rows).view(-1, 32, 16).all(-1)
    assert int(ordinary.sum()) > 1000
    assert bool(same[ordinary].all())
