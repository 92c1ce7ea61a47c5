"""The four KV records, bytes and values in both directions (C13; also C15's NaN codes)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.support import (
    E2M1,
    E4M3,
    GROUPS,
    HEAD_DIM,
    RECORDS,
    ROW_BYTES,
    UE8M0,
    assert_same_bits,
    bits,
    decode_pool,
    empty_cache,
    encode_row,
    page_bytes,
    row_bytes_at,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QUANTISED = ("fp8_ds_mla", "mxfp8", "nvfp4")
PAGE_SIZE = 5


def insert(rows: Tensor, record: str) -> Tensor:
    """A fresh cache with the rows in slots 0, 1, 2, …"""
    pages = -(-rows.shape[0] // PAGE_SIZE)
    cache, _ = empty_cache(record, pages, PAGE_SIZE, rows.device)
    dsv41ops.kv_cache_insert(rows, torch.arange(rows.shape[0], device=rows.device), cache)
    return cache


def gather(cache: Tensor, rows: int) -> Tensor:
    return dsv41ops.kv_cache_gather(cache, torch.arange(rows, device=cache.device))


def stored(cache: Tensor, record: str, slot: int) -> tuple[bytes, bytes]:
    """Data and scale bytes of one row."""
    page, row = divmod(slot, PAGE_SIZE)
    raw = page_bytes(cache)[page, row_bytes_at(record, PAGE_SIZE, row)].tolist()
    data = {"fp8_ds_mla": 576, "mxfp8": 512, "nvfp4": 256, "bf16": 1024}[record]
    return bytes(raw[:data]), bytes(raw[data:])


def assert_stored_as_spec(rows: Tensor, record: str) -> None:
    cache = insert(rows, record)
    for slot in range(rows.shape[0]):
        assert stored(cache, record, slot) == encode_row(rows[slot], record), f"row {slot}"


def grouped(values: list[float], record: str, device: torch.device) -> Tensor:
    """Rows whose scale groups each hold ±value and smaller companions; the last row is padded."""
    group, quantised = GROUPS[record]
    per_row = quantised // group
    values = values + [1.0] * (-len(values) % per_row)
    amax = torch.tensor(values, dtype=torch.float64).view(-1, per_row, 1)
    shrink = torch.linspace(-1, 1, group, dtype=torch.float64)
    rows = (amax * shrink).flatten(1)
    return torch.nn.functional.pad(rows, (0, HEAD_DIM - quantised)).bfloat16().to(device)


def bf16_neighbours(value: float) -> list[float]:
    """The bf16 numbers just below, at and just above a positive bf16 number."""
    code = torch.tensor([value], dtype=torch.bfloat16).view(torch.int16)
    return [(code + step).view(torch.bfloat16).item() for step in (-1, 0, 1)]


@pytest.mark.parametrize("record", RECORDS)
def test_random_rows(record: str, device: torch.device) -> None:
    magnitudes = torch.tensor([1e-6, 0.02, 1.0, 300.0], device=device)
    rows = torch.randn(12, HEAD_DIM, device=device) * magnitudes.repeat(3)[:, None]
    assert_stored_as_spec(rows.bfloat16(), record)


@pytest.mark.parametrize("record", ["fp8_ds_mla", "mxfp8"])
def test_c13_scale_at_every_power_of_two(record: str, device: torch.device) -> None:
    """amax = 448·2^k decides between two exponents; so do its bf16 neighbours."""
    values = [v for k in range(-20, 21) for v in bf16_neighbours(448.0 * 2.0**k)]
    rows = grouped(values, record, device)
    assert_stored_as_spec(rows, record)
    cache = insert(rows, record)
    scales = [code for slot in range(rows.shape[0]) for code in stored(cache, record, slot)[1]]
    if record == "fp8_ds_mla":
        scales = [code for index, code in enumerate(scales) if index % 8 != 7]
    for index, k in enumerate(range(-20, 21)):
        assert scales[3 * index : 3 * index + 3] == [127 + k, 127 + k, 128 + k]


@pytest.mark.parametrize("record", ["fp8_ds_mla", "mxfp8"])
def test_c13_named_scales(record: str, device: torch.device) -> None:
    named = {448.0: 127, 450.0: 128, 500.0: 128, 3.0: 120, 0.0: 105, 1e-6: 105, 1e-4: 105}
    rows = grouped(list(named), record, device)
    cache = insert(rows, record)
    codes = [code for slot in range(rows.shape[0]) for code in stored(cache, record, slot)[1][:7]]
    if record == "mxfp8":
        codes = list(stored(cache, record, 0)[1])
    assert codes[: len(named)] == list(named.values())


@pytest.mark.parametrize("record", ["fp8_ds_mla", "mxfp8"])
def test_c13_finite_input_never_becomes_nan(record: str, device: torch.device) -> None:
    """Largest finite, smallest subnormal, zeros of both signs, a lone outlier per group."""
    largest, least = torch.finfo(torch.bfloat16).max, 2.0**-133
    rows = torch.zeros(6, HEAD_DIM, device=device)
    rows[0] = largest
    rows[1] = -largest
    rows[2] = least
    rows[3] = -0.0
    rows[4, ::16] = largest
    rows[5, ::16] = 450.0
    rows = rows.bfloat16()
    assert_stored_as_spec(rows, record)
    cache = insert(rows, record)
    assert bool(torch.isfinite(decode_pool(cache)[:6]).all())
    for slot in range(6):
        data, _ = stored(cache, record, slot)
        assert not {0x7F, 0xFF} & set(data[: GROUPS[record][1]])


@pytest.mark.parametrize("record", ["fp8_ds_mla", "mxfp8"])
def test_e4m3_ties_go_to_even(record: str, device: torch.device) -> None:
    """Every midpoint of two e4m3 codes, subnormals included, in a group whose scale is 1."""
    midpoints = ((E4M3[:126] + E4M3[1:127]) / 2).tolist()  # exact in bf16
    group, quantised = GROUPS[record]
    values = torch.zeros(8, HEAD_DIM, dtype=torch.float64)
    values[:, :quantised:group] = 448.0
    free = [c for c in range(quantised) if c % group][: len(midpoints)]
    for row, nudge in enumerate((-1, 0, 1)):
        codes = torch.tensor(midpoints).bfloat16().view(torch.int16) + nudge
        values[row, free] = codes.view(torch.bfloat16).double()
        values[row + 3, free] = -values[row, free]
    rows = values.bfloat16().to(device)
    assert_stored_as_spec(rows, record)
    data, _ = stored(insert(rows, record), record, 1)
    assert all(data[column] % 2 == 0 for column in free)


def test_nvfp4_ties_go_to_even_and_saturate(device: torch.device) -> None:
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 6.0: 7}
    rows = torch.zeros(2, HEAD_DIM, dtype=torch.float64)
    for column, value in enumerate(ties):
        rows[0, column], rows[1, column] = value, -value
    cache = insert(rows.bfloat16().to(device), "nvfp4")
    for slot, sign in ((0, 0), (1, 8)):
        data, scales = stored(cache, "nvfp4", slot)
        assert scales[0] == 0x38  # 1.0: amax is 6
        assert list(data[:4]) == [
            (lo | sign) | (hi | sign) << 4
            for lo, hi in zip(*[iter(ties.values())] * 2, strict=True)
        ]
    # The scale rounds down (6.3 / 6 -> 1.0): 6.3 lies past the largest code and saturates.
    saturated = torch.zeros(1, HEAD_DIM, device=device)
    saturated[0, :2] = torch.tensor([6.3125, -6.3125])
    data, scales = stored(insert(saturated.bfloat16(), "nvfp4"), "nvfp4", 0)
    assert (data[0], scales[0]) == (7 | 15 << 4, 0x38)


def test_nvfp4_scale_sweep(device: torch.device) -> None:
    """Scale midpoints, both clamps (2^-9 and 448), powers of two and their neighbours."""
    midpoints = (3 * (E4M3[1:126] + E4M3[2:127])).tolist()
    values = [v for m in midpoints for v in bf16_neighbours(m)]
    values += [v for k in range(-20, 21) for v in bf16_neighbours(6.0 * 2.0**k)]
    values += [0.0, 2.0**-133, 2688.0, 2704.0, torch.finfo(torch.bfloat16).max]
    rows = grouped(values, "nvfp4", device)
    assert_stored_as_spec(rows, "nvfp4")
    cache = insert(rows, "nvfp4")
    assert bool(torch.isfinite(decode_pool(cache)[: rows.shape[0]]).all())


def test_c13_rope_lanes_are_exact_in_584_and_fp8_in_528(device: torch.device) -> None:
    row = torch.randn(1, HEAD_DIM, device=device).bfloat16()
    v4 = decode_pool(insert(row, "fp8_ds_mla"))[0]
    v41 = decode_pool(insert(row, "mxfp8"))[0]
    exact = row[0].double().cpu()
    assert torch.equal(v4[448:], exact[448:])
    assert not torch.equal(v41[448:], exact[448:])
    error = (v41[448:] - exact[448:]).abs()
    assert bool((error <= exact[448:].abs() / 16 + 2.0**-16).all())


@pytest.mark.parametrize("record", ["fp8_ds_mla", "bf16"])
def test_rope_bits_and_bf16_rows_survive_untouched(record: str, device: torch.device) -> None:
    """Stored as they came: NaN payloads, infinities, subnormals and -0.0."""
    codes = torch.arange(HEAD_DIM, dtype=torch.int32) * 128 + torch.randint(128, (HEAD_DIM,))
    raw = (codes - 2**15).to(torch.int16).view(torch.bfloat16).to(device)
    if record == "bf16":
        row = raw[None]
    else:
        row = torch.zeros(1, HEAD_DIM, dtype=torch.bfloat16, device=device)
        row[0, 448:] = raw[::8]
    assert_same_bits(gather(insert(row, record), 1), row)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("record", QUANTISED)
def test_non_finite_input_poisons_its_own_group_only(
    record: str, poison: float, device: torch.device
) -> None:
    group, quantised = GROUPS[record]
    clean = torch.randn(quantised // group, HEAD_DIM, device=device).bfloat16()
    rows = clean.clone()
    for row in range(rows.shape[0]):
        rows[row, row * group + (7 * row + 3) % group] = poison
    poisoned, expected = insert(rows, record), insert(clean, record)
    values = decode_pool(poisoned)
    gathered = gather(poisoned, rows.shape[0]).double().cpu()
    for row in range(rows.shape[0]):
        own = torch.zeros(HEAD_DIM, dtype=torch.bool)
        own[row * group : (row + 1) * group] = True
        assert bool(torch.isnan(values[row][own]).all())
        assert torch.equal(values[row][~own], decode_pool(expected)[row][~own])
        assert torch.equal(torch.isnan(gathered[row]), own)


@pytest.mark.parametrize("record", QUANTISED)
def test_decode_of_every_code_pair(record: str, device: torch.device) -> None:
    """All data codes under all scale codes: 0 is 2^-127 and 255 is NaN; rounded once to bf16."""
    group, quantised = GROUPS[record]
    per_row = quantised // group
    codes = 16 if record == "nvfp4" else 256
    pairs = torch.cartesian_prod(torch.arange(256), torch.arange(codes)).view(-1, group, 2)
    pairs = torch.nn.functional.pad(pairs, (0, 0, 0, 0, 0, -len(pairs) % per_row))
    scales, data = pairs[:, 0, 0].view(-1, per_row), pairs[..., 1].reshape(-1, quantised)
    rows = data.shape[0]
    cache, _ = empty_cache(record, rows, 1, device)
    if record == "nvfp4":
        data = data[:, ::2] | data[:, 1::2] << 4
    parts = [data, scales]
    if record == "fp8_ds_mla":
        parts = [data, torch.zeros(rows, 128, dtype=torch.int64), scales]
    packed = torch.cat(parts, 1).to(torch.uint8).to(device)
    cache[:, 0, : packed.shape[1]] = packed

    gathered = gather(cache, rows).cpu()[:, :quantised]
    table, scale_table = (E2M1, E4M3) if record == "nvfp4" else (E4M3, UE8M0)
    exact = table[pairs[..., 1]] * scale_table[pairs[..., 0]]
    expected = exact.view(rows, quantised).bfloat16()
    assert torch.equal(torch.isnan(gathered), torch.isnan(expected))
    number = ~torch.isnan(expected)
    assert_same_bits(gathered[number], expected[number])


@pytest.mark.parametrize("record", QUANTISED)
def test_decoding_is_exact_in_bf16(record: str, device: torch.device) -> None:
    """What the encoder writes needs no rounding: gather, insert, gather changes nothing."""
    rows = (torch.randn(20, HEAD_DIM, device=device) * 3).bfloat16()
    first = insert(rows, record)
    exact = decode_pool(first)[:20]
    values = gather(first, 20)
    assert torch.equal(values.double().cpu(), exact)
    if record != "nvfp4":  # its scale may rise by one step when the largest value rounds up
        again = gather(insert(values, record), 20)
        assert torch.equal(again, values)


@pytest.mark.parametrize(
    ("alias", "record"),
    [
        ("auto", "fp8_ds_mla"),
        ("fp8", "fp8_ds_mla"),
        ("bfloat16", "bf16"),
        *zip(RECORDS, RECORDS, strict=True),
    ],
)
def test_new_kv_cache_lays_pages_as_spec_says(
    alias: str, record: str, device: torch.device
) -> None:
    cache = dsv41ops.new_kv_cache(3, 64, alias, device)
    width = 512 if record == "bf16" else ROW_BYTES[record]
    assert cache.shape == (3, 64, width)
    assert cache.dtype == (torch.bfloat16 if record == "bf16" else torch.uint8)
    page = 37440 if record == "fp8_ds_mla" else 64 * width
    assert cache.stride() == (page, width, 1)
    assert not bool(bits(cache).any())
