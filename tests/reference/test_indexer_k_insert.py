"""Index keys: their bytes by hand and against f64, where they go, and what writes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.reference.index_keys import decode_index_keys
from tests.reference.test_large_strides import far_apart, untouched
from tests.support import (
    E2M1,
    E2M1_MAGNITUDES,
    E4M3,
    E4M3_MAGNITUDES,
    GUARD,
    UE8M0,
    assert_same_bits,
    ints,
    nearest_code,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 128
DTYPES = ("fp8", "mxfp4")
ROW_BYTES = {"fp8": 132, "mxfp4": 68}
DATA_BYTES = {"fp8": 128, "mxfp4": 64}
GROUP = {"fp8": 128, "mxfp4": 32}
LARGEST = {"fp8": 448.0, "mxfp4": 6.0}
MAGNITUDES = {"fp8": E4M3_MAGNITUDES, "mxfp4": E2M1_MAGNITUDES}


def guarded_cache(
    dtype: str, num_pages: int, page_size: int, device: torch.device, pad: int = 0
) -> tuple[Tensor, Tensor]:
    """A cache of guard bytes between two pages of them, and the whole pool."""
    used = page_size * ROW_BYTES[dtype]
    pool = torch.full((num_pages + 2, used + pad), GUARD, dtype=torch.uint8, device=device)
    shape = (num_pages, page_size, ROW_BYTES[dtype])
    cache = pool[1:-1].as_strided(shape, (used + pad, ROW_BYTES[dtype], 1), used + pad)
    return cache, pool


def where(dtype: str, page_size: int, row: int) -> list[int]:
    """Offsets inside a page of a row's bytes: data, then scales."""
    data, scales = row * DATA_BYTES[dtype], page_size * DATA_BYTES[dtype] + row * 4
    return [*range(data, data + DATA_BYTES[dtype]), *range(scales, scales + 4)]


def row_bytes(cache: Tensor, slot: int) -> Tensor:
    """Data and scale bytes of one row, on the CPU."""
    page, row = divmod(slot, cache.shape[1])
    dtype = {width: name for name, width in ROW_BYTES.items()}[cache.shape[2]]
    size = cache.shape[1] * cache.shape[2]
    flat = cache.as_strided((cache.shape[0], size), (cache.stride(0), 1))[page].cpu()
    return flat[where(dtype, cache.shape[1], row)]


def decoded(cache: Tensor, slot: int) -> tuple[Tensor, Tensor]:
    """f64 values of the codes, and the scale of each."""
    raw = row_bytes(cache, slot)
    if len(raw) == 132:
        scale = raw[128:].clone().view(torch.float32).double()
        return E4M3[raw[:128].long()], scale.expand(WIDTH)
    codes = torch.stack([raw[:64] & 15, raw[:64] >> 4], 1).flatten()
    return E2M1[codes.long()], UE8M0[raw[64:].long()].repeat_interleave(32)


def insert(keys: Tensor, cache: Tensor, slots: Tensor | None = None) -> None:
    """Keys as they are: of rows of ones the norm and a rotation by 0 leave the weight."""
    device = cache.device
    ones = torch.ones(1, WIDTH, device=device)
    still = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1).to(device)
    zero = ints([0], device)
    slots = torch.arange(len(keys), device=device) if slots is None else slots
    for key, slot in zip(keys.float().to(device), slots, strict=True):
        dsv41ops.indexer_k_insert(ones, key, zero, still, slot[None], cache)


def scale_of(amax: float, dtype: str) -> float:
    """2^ceil(log2(max(amax, 1e-4) / largest)), by comparing powers of two."""
    exponent = -40
    while LARGEST[dtype] * 2.0**exponent < max(amax, 1e-4):
        exponent += 1
    return 2.0**exponent


def check_key(cache: Tensor, slot: int, key: list[float]) -> None:
    """Every code is the nearest of the key's value."""
    dtype = {width: name for name, width in ROW_BYTES.items()}[cache.shape[2]]
    values, scales = decoded(cache, slot)
    for start in range(0, WIDTH, GROUP[dtype]):
        group = key[start : start + GROUP[dtype]]
        scale = scale_of(max(map(abs, group)), dtype)
        assert scales[start] == scale
        for value, got in zip(group, values[start : start + GROUP[dtype]].tolist(), strict=True):
            nearest = nearest_code(abs(value) / scale, MAGNITUDES[dtype])
            assert abs(got) == MAGNITUDES[dtype][nearest], (value, scale)
            assert got == 0 or (got < 0) == (value < 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_by_hand(dtype: str, device: torch.device) -> None:
    """Scale 1 and every tie of e2m1, of both signs; the first bytes are written out."""
    cache = dsv41ops.new_index_cache(1, 2, dtype, device)
    key = torch.zeros(WIDTH)
    key[:8] = torch.tensor([6.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, -5.0])
    key[32] = 448.0
    insert(key[None], cache)
    raw = row_bytes(cache, 0)
    if dtype == "mxfp4":
        # 6 and 0 | 1 and 1 | -2 and 2 | 4 and -4, the even element in the low nibble
        assert raw[:4].tolist() == [0x07, 0x22, 0x4C, 0xE6]
        assert raw[64:].tolist() == [127, 127 + 7, 127 - 15, 127 - 15]  # 448 / 6 -> 2^7
    else:
        assert raw[:4].tolist() == [0x4C, 0x28, 0x34, 0x3A]
        assert raw[128:].tolist() == [0, 0, 0x80, 0x3F]
    check_key(cache, 0, key.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_scale_boundaries(dtype: str, device: torch.device) -> None:
    magnitudes = torch.tensor(MAGNITUDES[dtype], dtype=torch.float64)
    middle = ((magnitudes[1:] + magnitudes[:-1]) / 2).float()
    near = torch.stack([middle, middle.nextafter(middle * 0), middle.nextafter(middle * 2)])
    keys = [torch.zeros(WIDTH) for _ in range(4)]
    for row in range(3):
        keys[row][0 :: GROUP[dtype]] = LARGEST[dtype]
        free = [c for c in range(WIDTH) if c % GROUP[dtype]][: len(middle)]
        keys[row][free] = near[row, : len(free)]
        keys.append(-keys[row])
    largest = torch.tensor(LARGEST[dtype])
    for exponent in (-19, -8, 0, 30, 100):
        for amax in (largest, largest.nextafter(largest * 2), largest.nextafter(largest * 0)):
            keys.append(torch.linspace(-1, 1, WIDTH) * amax * 2.0**exponent)
    for amax in (0.0, 1e-30, 1e-4, 1.0001e-4, 3.4e38):
        keys.append(torch.full((WIDTH,), amax))
    cache = dsv41ops.new_index_cache(len(keys), 1, dtype, device)
    insert(torch.stack(keys), cache)
    for slot, key in enumerate(keys):
        check_key(cache, slot, key.double().tolist())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_poison_their_group(
    dtype: str, poison: float, device: torch.device
) -> None:
    key = torch.linspace(-3, 2, WIDTH)
    key[40] = poison
    cache = dsv41ops.new_index_cache(1, 1, dtype, device)
    insert(key[None], cache)
    got = decode_index_keys(cache, ints([0], device))[0]
    start = 40 // GROUP[dtype] * GROUP[dtype]
    poisoned = torch.zeros(WIDTH, dtype=torch.bool, device=device)
    poisoned[start : start + GROUP[dtype]] = True
    assert torch.equal(got.isnan(), poisoned)


def rope_table(num_positions: int, device: torch.device) -> Tensor:
    angles = torch.rand(num_positions, 32, device=device, dtype=torch.float64) * 6.3
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def exact_keys(k: Tensor, weight: Tensor, table: Tensor, positions: list[int]) -> Tensor:
    x, weight, table = k.double().cpu(), weight.double().cpu(), table.double().cpu()
    x = x / (x.square().mean(1, keepdim=True) + 1e-20).sqrt() * weight
    cos, sin = table[positions].split(32, 1)
    even, odd = x[:, 64::2].clone(), x[:, 65::2].clone()
    x[:, 64::2], x[:, 65::2] = even * cos - odd * sin, even * sin + odd * cos
    return x


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("k_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_f64(dtype: str, k_dtype: torch.dtype, ratio: int, device: torch.device) -> None:
    """Norm, rotation at the group's first position, encoding; nothing is rounded in between."""
    k = torch.randn(11, WIDTH, device=device) * torch.logspace(-8, 8, 11, device=device)[:, None]
    k = k.to(k_dtype)
    weight = torch.randn(WIDTH, device=device).to(k_dtype)
    table = rope_table(12, device)
    positions = ints(range(11), device, torch.int64 if ratio == 2 else torch.int32)
    cache = dsv41ops.new_index_cache(4, 3, dtype, device)
    slots = torch.randperm(12, device=device)[:11]
    dsv41ops.indexer_k_insert(k, weight, positions, table, slots, cache, ratio)
    first = [position // ratio * ratio for position in range(11)]
    expected = exact_keys(k, weight, table, first)
    for slot, key in zip(slots.tolist(), expected, strict=True):
        check_rounding(*decoded(cache, slot), key, dtype)


def check_rounding(values: Tensor, scales: Tensor, key: Tensor, dtype: str) -> None:
    """Each code is the nearest of a value within 1e-6 of the group's largest of the exact one."""
    amax = key.abs().unflatten(0, (-1, GROUP[dtype])).amax(1).repeat_interleave(GROUP[dtype])
    assert [scale_of(a, dtype) for a in amax.tolist()] == scales.tolist()
    for value, scale, exact, largest in zip(
        values.tolist(), scales.tolist(), key.tolist(), amax.tolist(), strict=True
    ):
        near = []
        for shifted in (exact - 1e-6 * largest, exact, exact + 1e-6 * largest):
            code = nearest_code(abs(shifted) / scale, MAGNITUDES[dtype])
            near.append(math.copysign(MAGNITUDES[dtype][code], shifted))
        assert value in near, (exact, scale)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pad", [0, 3, 64])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_named_rows(
    dtype: str, page_size: int, pad: int, slot_dtype: torch.dtype, device: torch.device
) -> None:
    cache, pool = guarded_cache(dtype, 4, page_size, device, pad)
    before = pool.clone()
    end = 4 * page_size
    slots = [end - 1, -7, 0, page_size, end, 2**31 - 1, -(2**31)]
    if slot_dtype == torch.int64:
        slots += [2**32, 2**32 + 1, -(2**32), 2**62]
    count = len(slots)
    k = torch.randn(count, 2 * WIDTH, device=device)[:, 1 : WIDTH + 1]
    weight, table = torch.ones(WIDTH, device=device), rope_table(count, device)
    positions = torch.arange(count, device=device)
    dsv41ops.indexer_k_insert(k, weight, positions, table, ints(slots, device, slot_dtype), cache)
    expected = exact_keys(k, weight, table, list(range(count)))
    named = torch.zeros_like(pool, dtype=torch.bool)
    for slot, key in zip(slots, expected, strict=True):
        if 0 <= slot < end:
            named[1 + slot // page_size, where(dtype, page_size, slot % page_size)] = True
            check_rounding(*decoded(cache, slot), key, dtype)
    assert torch.equal(pool[~named], before[~named])


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_without_a_row(
    dtype: str, position_dtype: torch.dtype, device: torch.device
) -> None:
    """Below 0, past the table, far past it: no write. The group's first position counts."""
    positions = [-1, 4, 5, 6, -(2**31), 2**31 - 1]
    if position_dtype == torch.int64:
        positions += [2**32, -(2**40), 2**62]
    count = len(positions)
    cache, pool = guarded_cache(dtype, count, 1, device)
    before = pool.clone()
    arguments = (
        torch.randn(count, WIDTH, device=device),
        torch.ones(WIDTH, device=device),
        ints(positions, device, position_dtype),
    )
    slots = torch.arange(count, device=device)
    dsv41ops.indexer_k_insert(*arguments, rope_table(5, device), slots, cache, 2)
    changed = (pool != before).any(1)[1:-1].nonzero().flatten().tolist()
    assert changed == [1, 2]  # 5 is of the group that begins at 4
    before = pool.clone()
    dsv41ops.indexer_k_insert(*arguments, rope_table(0, device), slots, cache, 2)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_do(dtype: str, device: torch.device) -> None:
    weight, table = torch.ones(WIDTH, device=device), rope_table(2, device)
    for count, pages in ((0, 2), (2, 0)):
        cache, pool = guarded_cache(dtype, pages, 3, device)
        k, numbers = torch.ones(count, WIDTH, device=device), torch.arange(count, device=device)
        dsv41ops.indexer_k_insert(k, weight, numbers, table, numbers, cache)
        assert bool((pool == GUARD).all())
        assert decode_index_keys(cache, numbers).shape == (count, WIDTH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_is_exact(dtype: str, device: torch.device) -> None:
    """Every code under several scales; zeros for a slot outside the cache."""
    cache, pool = guarded_cache(dtype, 3, 5, device, pad=2)
    pool.copy_(torch.randint(256, pool.shape, device=device))
    for page in cache.as_strided((3, 5 * ROW_BYTES[dtype]), (cache.stride(0), 1)):
        scales = page[5 * DATA_BYTES[dtype] :]
        if dtype == "fp8":
            values = torch.tensor([0.0, 2.0**-22, 1.0, 0.3, math.nan], device=device)
            scales.copy_(values.view(torch.uint8))
    slots = [-1, 0, 14, 7, 15, 2**31 - 1, -(2**31)]
    got = decode_index_keys(cache, ints(slots, device))
    for slot, row in zip(slots, got.cpu(), strict=True):
        if 0 <= slot < 15:
            values, scales = decoded(cache, slot)
            torch.testing.assert_close(
                row, (values * scales).float(), rtol=0, atol=0, equal_nan=True
            )
        else:
            assert_same_bits(row, torch.zeros(WIDTH))


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_pages_and_rows(dtype: str, device: torch.device) -> None:
    """Offsets past 2^31: of pages, of rows of k and of cos_sin."""
    k, table = torch.randn(3, WIDTH, device=device), rope_table(3, device)
    weight, numbers = torch.ones(WIDTH, device=device), torch.arange(3, device=device)
    slots = ints([0, 3, 5], device)
    near = dsv41ops.new_index_cache(3, 2, dtype, device)
    dsv41ops.indexer_k_insert(k, weight, numbers, table, slots, near)
    stride = 2**30 + 1152
    memory = untouched(2 * stride + 2 * ROW_BYTES[dtype], device)
    far = memory.as_strided(near.shape, (stride, ROW_BYTES[dtype], 1))
    rows = far_apart(k, 2**30 + 4), weight, numbers, far_apart(table, 2**30 + 4)
    dsv41ops.indexer_k_insert(*rows, slots, far)
    assert_same_bits(far, near)
    assert_same_bits(decode_index_keys(far, slots), decode_index_keys(near, slots))


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_index_cache(dtype: str, device: torch.device) -> None:
    cache = dsv41ops.new_index_cache(3, 5, index_cache_dtype=dtype, device=device)
    assert (cache.shape, cache.dtype) == ((3, 5, ROW_BYTES[dtype]), torch.uint8)
    assert cache.is_contiguous()
    assert cache.device.type == device.type
    assert not bool(cache.any())
    assert dsv41ops.new_index_cache(1, 2).shape[2] == 132


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2), "num_pages: expected at least 0, got -1"),
        ((1, 0), "page_size: expected at least 1, got 0"),
        ((1, 2, "nvfp4"), "index_cache_dtype: expected one of fp8, mxfp4; got 'nvfp4'"),
    ],
)
def test_new_index_cache_refuses(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        dsv41ops.new_index_cache(*arguments)
