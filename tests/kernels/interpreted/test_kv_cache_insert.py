"""The kernel against the reference: every byte of the pool."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton.kv_cache_insert import launch_kv_cache_insert
from dsv41ops.reference.kv_cache import kv_cache_insert
from tests.kernels.interpreted.batches import CPU, FAR
from tests.support import E4M3, GROUPS, HEAD_DIM, RECORDS, empty_cache, ints

QUANTISED = [record for record in RECORDS if record != "bf16"]


def check(
    rows: Tensor, slots: Tensor, record: str, pages: int, page_size: int, *, pad: int = 0
) -> None:
    """The same insert by both, into two pools of guard bytes."""
    pools = []
    for insert in (launch_kv_cache_insert, kv_cache_insert):
        cache, pool = empty_cache(record, pages, page_size, CPU, pad=pad)
        insert(rows, slots, cache)
        pools.append(pool)
    assert torch.equal(*pools)


def check_values(rows: Tensor, record: str) -> None:
    check(rows.bfloat16(), torch.arange(len(rows)), record, -(-len(rows) // 5), 5)


def codes(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("record", RECORDS)
def test_every_bf16_value(record: str) -> None:
    """Subnormals, both zeros, infinities and NaN payloads, beside their neighbours."""
    every = codes(-(2**15), 2**15).view(-1, HEAD_DIM)
    check(every[::7].contiguous(), torch.arange(19), record, 4, 5)
    check(every.view(HEAD_DIM, -1).T[::9].contiguous(), torch.arange(15), record, 3, 5)


@pytest.mark.parametrize("record", RECORDS)
def test_random_rows(record: str) -> None:
    check_values(torch.randn(12, HEAD_DIM) * torch.logspace(-38, 38, 12)[:, None], record)
    spread = torch.randn(6, HEAD_DIM) * torch.exp2(torch.randint(-12, 12, (6, HEAD_DIM)))
    check_values(spread, record)


@pytest.mark.parametrize("record", ["fp8_ds_mla", "mxfp8"])
def test_scale_and_code_ties(record: str) -> None:
    """amax at 448·2^k and its neighbours; every midpoint of two e4m3 codes and its neighbours."""
    amax = codes(0x43E0 - 1, 0x43E0 + 2).double()[:, None] * 2.0 ** torch.arange(-20, 21)
    group, quantised = GROUPS[record]
    per_row = quantised // group
    rows = torch.zeros(-(-amax.numel() // per_row), HEAD_DIM, dtype=torch.float64)
    for index, value in enumerate(amax.flatten().tolist()):
        row, column = divmod(index, per_row)
        rows[row, column * group : (column + 1) * group] = value * torch.linspace(-1, 1, group)
    check_values(rows, record)

    midpoints = ((E4M3[:126] + E4M3[1:127]) / 2).bfloat16().view(torch.int16)
    ties = torch.zeros(6, HEAD_DIM, dtype=torch.bfloat16)
    ties[:, :quantised:group] = 448.0
    free = [c for c in range(quantised) if c % group][: len(midpoints)]
    for row, nudge in enumerate((-1, 0, 1)):
        ties[row, free] = (midpoints + nudge).view(torch.bfloat16)
        ties[row + 3, free] = -ties[row, free]
    check_values(ties, record)


def test_nvfp4_scale_ties_and_clamps() -> None:
    midpoints = 3 * (E4M3[1:126] + E4M3[2:127])
    near = midpoints.bfloat16().view(torch.int16)[:, None] + torch.tensor([-1, 0, 1]).short()
    amax = near.flatten().view(torch.bfloat16).double()
    amax = torch.cat([amax, torch.tensor([0.0, 2.0**-133, 2688, 2704, 3e38, 6 * 2.0**-9, 1e-3])])
    amax = torch.nn.functional.pad(amax, (0, -len(amax) % 32)).view(-1, 32, 1)
    check_values((amax * torch.linspace(-1, 1, 16)).flatten(1), "nvfp4")


def test_nvfp4_code_ties() -> None:
    """Half-way points of two codes under every scale, with their bf16 neighbours."""
    half_way = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scales = E4M3[1:127].float()[:, None]
    middle = (scales * half_way).bfloat16().view(torch.int16)
    groups = torch.zeros(3, 128, 16, dtype=torch.bfloat16)
    for index, nudge in enumerate((-1, 0, 1)):
        groups[index, :126, 0] = (scales * 6).bfloat16()[:, 0]
        groups[index, :126, 1:8] = (middle + nudge).view(torch.bfloat16)
        groups[index, :126, 8:15] = -groups[index, :126, 1:8]
        groups[index, :126, 15] = -0.0
    check_values(groups.view(-1, HEAD_DIM), "nvfp4")


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("record", QUANTISED)
def test_non_finite_values_poison_their_group(record: str, poison: float) -> None:
    rows = torch.randn(4, HEAD_DIM)
    for row, column in enumerate((0, 77, 300, 511)):
        rows[row, column] = poison
    check_values(rows, record)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pad", [0, 6, 16, 1022])
@pytest.mark.parametrize("record", RECORDS)
def test_only_the_named_rows(record: str, pad: int, dtype: torch.dtype) -> None:
    """No slot, slots past the cache, strided rows; aligned pages and others."""
    slots = [11, -7, 0, 3, 12, FAR, -(2**31), -1]
    if dtype == torch.int64:
        slots += [2**32, 2**32 + 5, -(2**32), 2**62]
    rows = torch.randn(len(slots), 2 * HEAD_DIM + 1).bfloat16()[:, 1 : HEAD_DIM + 1]
    check(rows, ints(slots, CPU, dtype), record, 4, 3, pad=pad)


@pytest.mark.parametrize("record", RECORDS)
def test_odd_addresses(record: str) -> None:
    """A byte cache may begin anywhere; the bf16 record too may be held as bytes."""
    row_bytes = {"fp8_ds_mla": 584, "mxfp8": 528, "nvfp4": 288, "bf16": 1024}[record]
    rows = torch.randn(5, HEAD_DIM).bfloat16()
    pools = []
    for insert in (launch_kv_cache_insert, kv_cache_insert):
        pool = torch.full((9000,), 0xA5, dtype=torch.uint8)
        cache = pool.as_strided((2, 3, row_bytes), (3 * row_bytes + 5, row_bytes, 1), 7)
        insert(rows, ints([5, 2, -1, 0, 3], CPU), cache)
        pools.append(pool)
    assert torch.equal(*pools)


@pytest.mark.parametrize("record", RECORDS)
def test_nothing_to_do(record: str) -> None:
    check(torch.empty(0, HEAD_DIM).bfloat16(), ints([], CPU), record, 2, 3)
    check(torch.ones(2, HEAD_DIM).bfloat16(), ints([0, -1], CPU), record, 0, 3)
