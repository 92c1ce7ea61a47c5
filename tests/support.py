"""Byte formats and attention written a second time, slowly, from SPEC; never calls the package.

Values are Python floats or float64 tensors on the CPU, so a result is exact until it is compared.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

HEAD_DIM = 512
SCALE = 512**-0.5
RECORDS = ("fp8_ds_mla", "mxfp8", "nvfp4", "bf16")
ROW_BYTES = {"fp8_ds_mla": 584, "mxfp8": 528, "nvfp4": 288, "bf16": 1024}
RECORD_OF_BYTES = {row_bytes: record for record, row_bytes in ROW_BYTES.items()}
# Values per scale, number of quantised values.
GROUPS = {"fp8_ds_mla": (64, 448), "mxfp8": (32, 512), "nvfp4": (16, 512)}
GUARD = 0xA5


def e4m3_value(code: int) -> float:
    """One e4m3fn code: bias 7, no infinity, 0x7F and 0xFF are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def ue8m0_value(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAGNITUDES = tuple(e4m3_value(code) for code in range(127))
E4M3 = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)
UE8M0 = torch.tensor([ue8m0_value(code) for code in range(256)], dtype=torch.float64)
# Code 8 is a negative zero; vLLM's recorded decoder reads it as +0.
E2M1 = torch.tensor(
    [*E2M1_MAGNITUDES, 0.0, *(-v for v in E2M1_MAGNITUDES[1:])], dtype=torch.float64
)


def nearest_code(value: float, magnitudes: Sequence[float]) -> int:
    """Code of the nearest magnitude, ties to even, saturating; the caller adds the sign."""
    above = bisect.bisect_left(magnitudes, value)
    if above in (0, len(magnitudes)):
        return min(above, len(magnitudes) - 1)
    below = above - 1
    gap_below, gap_above = value - magnitudes[below], magnitudes[above] - value
    if gap_below == gap_above:
        return below if below % 2 == 0 else above
    return below if gap_below < gap_above else above


def ue8m0_scale_code(amax: float) -> int:
    """``ceil(log2(max(amax, 1e-4) / 448)) + 127``, by comparing powers of two."""
    exponent = -40
    while 448.0 * 2.0**exponent < max(amax, 1e-4):
        exponent += 1
    return exponent + 127


def encode_row(row: Tensor, record: str) -> tuple[bytes, bytes]:
    """Data and scale bytes of one finite bf16 row, value by value."""
    if record == "bf16":
        return bytes(row.cpu().contiguous().view(torch.uint8).tolist()), b""
    values: list[float] = row.double().cpu().tolist()
    group, quantised = GROUPS[record]
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, quantised, group):
        block = values[start : start + group]
        amax = max(abs(value) for value in block)
        if record == "nvfp4":
            scale_code = nearest_code(min(max(amax / 6, 2.0**-9), 448.0), E4M3_MAGNITUDES)
            scale, magnitudes, sign_bit = e4m3_value(scale_code), E2M1_MAGNITUDES, 8
        else:
            scale_code = ue8m0_scale_code(amax)
            scale, magnitudes, sign_bit = ue8m0_value(scale_code), E4M3_MAGNITUDES, 128
        scales.append(scale_code)
        for value in block:
            code = nearest_code(abs(value) / scale, magnitudes)
            codes.append(code | (sign_bit if math.copysign(1.0, value) < 0 else 0))
    if record == "nvfp4":
        return bytes(lo | hi << 4 for lo, hi in zip(codes[::2], codes[1::2], strict=True)), bytes(
            scales
        )
    data = bytes(codes)
    if record == "fp8_ds_mla":
        rope = row[448:].cpu().contiguous().view(torch.uint8).tolist()
        return data + bytes(rope), bytes([*scales, 0])
    return data, bytes(scales)


def record_of(cache: Tensor) -> str:
    return RECORD_OF_BYTES[cache.shape[-1] * cache.element_size()]


def page_bytes(cache: Tensor) -> Tensor:
    """``[pages, page_size * row_bytes]`` uint8 on the CPU: each page as it lies, less padding."""
    pages, page_size, width = cache.shape
    flat = cache.as_strided((pages, page_size * width), (cache.stride(0), 1)).cpu().contiguous()
    return flat.view(torch.uint8)


def row_bytes_at(record: str, page_size: int, row: int) -> list[int]:
    """Offsets inside a page of the bytes of one row: data first, then scales."""
    if record == "fp8_ds_mla":
        data, scales = range(row * 576, (row + 1) * 576), page_size * 576 + row * 8
        return [*data, *range(scales, scales + 8)]
    width = ROW_BYTES[record]
    return list(range(row * width, (row + 1) * width))


def decode_pool(cache: Tensor) -> Tensor:
    """Every row of a cache, float64 ``[pages * page_size, 512]``."""
    record = record_of(cache)
    pages, page_size = cache.shape[:2]
    raw = page_bytes(cache)
    if record == "bf16":
        return raw.view(torch.bfloat16).view(-1, HEAD_DIM).double()
    if record == "fp8_ds_mla":
        data = raw[:, : page_size * 576].reshape(-1, 576)
        scales = raw[:, page_size * 576 :].reshape(-1, 8)[:, :7]
        nope = E4M3[data[:, :448].long()] * UE8M0[scales.long()].repeat_interleave(64, 1)
        rope = data[:, 448:].contiguous().view(torch.bfloat16).double()
        return torch.cat([nope, rope], 1)
    rows = raw.reshape(pages * page_size, -1)
    if record == "mxfp8":
        return E4M3[rows[:, :512].long()] * UE8M0[rows[:, 512:].long()].repeat_interleave(32, 1)
    packed = rows[:, :256].long()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return E2M1[codes] * E4M3[rows[:, 256:].long()].repeat_interleave(16, 1)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes: NaN equals NaN, -0.0 differs from 0.0."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def empty_cache(
    record: str,
    num_pages: int,
    page_size: int,
    device: torch.device,
    *,
    pad: int = 0,
    fill: int = GUARD,
) -> tuple[Tensor, Tensor]:
    """A cache whose bytes are all ``fill``, inside a pool with a guard page on each side.

    Returns the cache and the whole pool ``[num_pages + 2, page stride]`` uint8, which share memory.
    """
    row_bytes = ROW_BYTES[record]
    used = page_size * row_bytes
    stride = (-(-used // 576) * 576 if record == "fp8_ds_mla" else used) + pad
    pool = torch.full((num_pages + 2, stride), fill, dtype=torch.uint8, device=device)
    typed = pool.view(torch.bfloat16) if record == "bf16" else pool
    width = row_bytes // typed.element_size()
    cache = typed[1:-1].as_strided(
        (num_pages, page_size, width), (typed.stride(0), width, 1), typed.stride(0)
    )
    return cache, pool


def random_cache(
    record: str, num_pages: int, page_size: int, device: torch.device, *, pad: int = 0
) -> Tensor:
    """A cache of random finite rows of ordinary size; padding and guard pages stay 0xA5."""
    cache, pool = empty_cache(record, num_pages, page_size, device, pad=pad)
    rows = num_pages * page_size
    pages = torch.empty(num_pages, page_size * ROW_BYTES[record], dtype=torch.uint8)
    if record == "bf16":
        pages = torch.randn(num_pages, page_size * HEAD_DIM).bfloat16().view(torch.uint8)
    elif record == "nvfp4":
        data = torch.randint(256, (rows, 256))
        scales = torch.randint(0x28, 0x35, (rows, 32))  # 0.25 .. 0.8125
        pages = torch.cat([data, scales], 1).to(torch.uint8).view(num_pages, -1)
    else:
        group, quantised = GROUPS[record]
        sign, magnitude = (
            torch.randint(2, (2, rows, quantised))[0],
            torch.randint(72, (rows, quantised)),
        )
        data = (sign << 7 | magnitude).to(torch.uint8)  # up to 3.75
        scales = torch.randint(125, 129, (rows, quantised // group)).to(torch.uint8)
        if record == "mxfp8":
            pages = torch.cat([data, scales], 1).view(num_pages, -1)
        else:
            rope = torch.randn(rows, 64).bfloat16().view(torch.uint8)
            data = torch.cat([data, rope], 1).view(num_pages, -1)
            scales = torch.cat([scales, torch.zeros(rows, 1, dtype=torch.uint8)], 1)
            pages = torch.cat([data, scales.view(num_pages, -1)], 1)
    pool[1:-1, : pages.shape[1]] = pages.to(device)
    return cache


def ints(values: Iterable, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(
        values if isinstance(values, list) else list(values), dtype=dtype, device=device
    )


def visible_rows(indices: Tensor, lens: Tensor, num_rows: int) -> list[list[int]]:
    """Per token, the entries below its clamped length that lie inside the cache."""
    rows = []
    for entries, length in zip(indices.tolist(), lens.tolist(), strict=True):
        named = entries[: min(max(length, 0), len(entries))]
        rows.append([entry for entry in named if 0 <= entry < num_rows])
    return rows


def dense_attention(
    q: Tensor,
    caches: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    sink: Tensor | None = None,
    scale: float = SCALE,
) -> tuple[Tensor, Tensor]:
    """Sparse MLA in float64 over ``(cache, indices, lens)`` parts, one softmax over all of them."""
    num_tokens, heads = q.shape[:2]
    pools = [decode_pool(cache) for cache, _, _ in caches]
    rows = [
        visible_rows(indices, lens, pool.shape[0])
        for pool, (_, indices, lens) in zip(pools, caches, strict=True)
    ]
    out = torch.zeros(num_tokens, heads, HEAD_DIM, dtype=torch.float64)
    lse = torch.full((num_tokens, heads), -math.inf, dtype=torch.float64)
    queries = q.double().cpu()
    for token in range(num_tokens):
        keys = torch.cat([pool[named[token]] for pool, named in zip(pools, rows, strict=True)])
        if keys.shape[0] == 0:
            continue
        scores = scale * queries[token] @ keys.T
        lse[token] = torch.logsumexp(scores, -1)
        out[token] = torch.softmax(scores, -1) @ keys
    if sink is not None:
        share = 1 / (1 + torch.exp(sink.double().cpu() - lse))
        out = torch.where(torch.isneginf(lse)[..., None], 0.0, out * share[..., None])
    return out, lse


def rotated(rows: Tensor, positions: Tensor, cos_sin: Tensor, *, back: bool = False) -> Tensor:
    """float64 rows whose last 64 columns, 32 complex numbers, are turned to their positions."""
    rows, table = rows.double().cpu().clone(), cos_sin.double().cpu()
    for row, position in zip(rows, positions.tolist(), strict=True):
        if 0 <= position < len(table):
            turn = torch.complex(*table[position].chunk(2))
            pairs = torch.view_as_complex(row[..., -64:].unflatten(-1, (32, 2)).contiguous())
            turned = pairs * (turn.conj() if back else turn)
            row[..., -64:] = torch.view_as_real(turned).flatten(-2)
    return rows


def assert_attention_close(
    out: Tensor, lse: Tensor, expected_out: Tensor, expected_lse: Tensor, rtol: float = 4e-3
) -> None:
    """``out`` within bf16 rounding (SPEC: 4e-3 relative; here per head), ``lse`` within f32's."""
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    actual, expected = out.double().cpu(), expected_out.double().cpu()
    assert actual.shape == expected.shape
    error = (actual - expected).norm(dim=-1)
    assert bool((error <= rtol * expected.norm(dim=-1)).all()), (
        f"largest relative error {(error / expected.norm(dim=-1)).nan_to_num(0).max():.2e}"
    )
    torch.testing.assert_close(
        lse.double().cpu(), expected_lse.double().cpu(), rtol=2e-6, atol=2e-5, equal_nan=True
    )
