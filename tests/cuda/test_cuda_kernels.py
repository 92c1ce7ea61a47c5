"""What is special to the CUDA C++ kernels of sparse_mla_decode; test_backends.py has the rest."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.configs import (
    MMA_RANKS,
    RING_SLOTS,
    WGMMA_US,
    DecodeProblem,
    WgmmaConfig,
    cuda_config,
    mma_config,
)
from dsv41ops.kernels.device import sms_and_capability
from tests.cuda.test_backends import check
from tests.cuda.test_capture import CUDA
from tests.decode_calls import Call, random_part, random_rope
from tests.support import (
    HEAD_DIM,
    ROW_BYTES,
    assert_attention_close,
    assert_same_bits,
    ints,
    record_of,
    row_bytes_at,
)

Pair = tuple[str, str | None]

PAIRS: list[Pair] = [
    (window, None if record == "none" else record)
    for window, record in (records.split("+") for records in RING_SLOTS)
]
PAIR = ("mxfp8", "nvfp4")
# The mma kernel by ranks, the wgmma kernel by heads and ranks. Some of every kind of CTA.
Kernel = int | str
WGMMA = {
    f"wgmma{heads}x{ranks}" if ranks > 1 else f"wgmma{heads}": WgmmaConfig(heads, ranks)
    for heads, ranks in WGMMA_US["mxfp8"]
}
KERNELS: list[Kernel] = [*MMA_RANKS, *WGMMA]
SHAPES: list[Kernel] = [1, 4, "wgmma64", "wgmma64x2", "wgmma32", "wgmma32x3", "wgmma16"]


def cases(pairs: list[Pair], kernels: list[Kernel]) -> list[tuple[Pair, Kernel]]:
    """Those that there are: nobody converts bf16 rows for another."""
    return [
        (pair, kernel)
        for pair in pairs
        for kernel in kernels
        if not (kernel == "wgmma64x2" and "bf16" in pair)
    ]


EVERY_KERNEL, EVERY_SHAPE = cases(PAIRS, KERNELS), cases(PAIRS, SHAPES)
HEADS: dict[Kernel, tuple[int, ...]] = {
    "wgmma64": (33, 64, 70, 128),
    "wgmma64x2": (65, 100, 128),
    "wgmma32": (5, 32, 40, 128),
    "wgmma16": (5, 16, 20),
}
QUANTISED = [pair for pair in PAIRS if "bf16" not in pair]
ROPE = 448  # the first column that fp8_ds_mla stores as bf16


@pytest.fixture(autouse=True)
def _serves() -> None:
    reason = dsv41ops.backends(device=torch.device("cuda", 0))["cuda"]
    if reason is not None:
        pytest.skip(reason)


def random_call(
    pair: Pair,
    num_tokens: int,
    heads: int,
    *,
    window_width: int = 37,
    width: int = 165,
    page_size: int = 32,
) -> Call:
    """Pages at multiples of 16 bytes, which is all that these kernels take."""
    parts = [
        random_part(record, num_tokens, columns, CUDA, page_size=page_size, pad=64)
        for record, columns in zip(pair, (window_width, width), strict=True)
        if record is not None and columns > 0
    ]
    q = torch.randn(num_tokens, heads, HEAD_DIM, device=CUDA).bfloat16()
    return Call(q, tuple(parts), torch.randn(heads, device=CUDA) * 2 + 3)


def run(call: Call, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """By a kernel of the test's choice."""
    if kernel == "wgmma64x2" and call.q.shape[1] <= 64:
        return run_twice(call, kernel)
    from dsv41ops.kernels.cuda.sparse_mla_decode import launch_sparse_mla_decode

    window, *rest = call.parts
    extra = rest[0] if rest else None
    records = f"{record_of(window.cache)}+{record_of(extra.cache) if extra else 'none'}"
    return launch_sparse_mla_decode(
        *(call.q, window.cache, window.indices, window.lens),
        *((extra.cache, extra.indices, extra.lens) if extra else (None,) * 3),
        *(call.sink, call.scale, False),
        **({} if call.rope is None else call.rope.arguments()),
        config=WGMMA[kernel] if isinstance(kernel, str) else mma_config(records, kernel),
    )


def run_twice(call: Call, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """By a kernel for more than 64 heads: its CTAs get the same, and give the same."""
    heads = call.q.shape[1]
    filler = torch.zeros_like(call.q[:, :1]).expand(-1, 64 - heads, -1)
    sink = call.sink
    if sink is not None:
        sink = torch.cat([sink, sink.new_zeros(64 - heads), sink])
    out, lse = run(replace(call, q=torch.cat([call.q, filler, call.q], 1), sink=sink), kernel)
    assert_same_bits(out[:, 64:].contiguous(), out[:, :heads].contiguous())
    assert_same_bits(lse[:, 64:].contiguous(), lse[:, :heads].contiguous())
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()


def check_kernel(call: Call, kernel: Kernel) -> None:
    """Right, and the same bits every time."""
    out, lse = run(call, kernel)
    assert_attention_close(out, lse, *call.exact())
    for again in (run(call, kernel) for _ in range(3)):
        assert_same_bits(again[0], out)
        assert_same_bits(again[1], lse)


def check_same_results(call: Call, other: Call, kernel: Kernel) -> None:
    for got, want in zip(run(call, kernel), run(other, kernel), strict=True):
        assert_same_bits(got, want)


def partly_beyond_f16(call: Call) -> Call:
    """A fifth of the tokens gets queries that f16 does not hold; the scale is for them."""
    large = torch.rand(len(call.q), device=CUDA) < 0.2
    call.q[large] *= 2.0**14
    return replace(call, scale=call.scale * 2.0**-14)


def flat_pages(cache: Tensor) -> Tensor:
    """``[pages, bytes]``, a view."""
    raw = cache.view(torch.uint8)
    pages, page_size, width = raw.shape
    return raw.as_strided((pages, page_size * width), (raw.stride(0), 1))


def data_and_scales(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views ``[pages, page_size, quantised bytes]`` and ``[pages, page_size, scale codes]``."""
    pages, page_size, _ = cache.shape
    record, stride = record_of(cache), cache.stride(0)
    if record == "fp8_ds_mla":
        first = cache.storage_offset() + page_size * 576
        return (
            cache.as_strided((pages, page_size, ROPE), (stride, 576, 1)),
            cache.as_strided((pages, page_size, 7), (stride, 8, 1), first),
        )
    data = ROW_BYTES[record] - {"mxfp8": 16, "nvfp4": 32}[record]
    return cache[..., :data], cache[..., data:]


def refill(view: Tensor, low: int, high: int, *, signs: bool = False) -> None:
    """Random codes ``low .. high - 1``."""
    codes = torch.randint(low, high, view.shape, device=CUDA)
    if signs:
        codes |= torch.randint(2, view.shape, device=CUDA) << 7
    view.copy_(codes)


def check_columns(call: Call, kernel: Kernel, rtol: float = 4e-3) -> None:
    """As usual, and the quantised columns by themselves, which bf16 ones could hide."""
    out, lse = run(call, kernel)
    exact, exact_lse = call.exact()
    for columns in (slice(None), slice(ROPE), slice(ROPE, None)):
        assert_attention_close(out[..., columns], lse, exact[..., columns], exact_lse, rtol)


@pytest.mark.parametrize("heads", [1, 5, 16, 17, 64, 128])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_heads(pair: Pair, heads: int) -> None:
    check(random_call(pair, 7, heads), "cuda")


@pytest.mark.parametrize(
    ("pair", "kernel", "heads"),
    [
        (pair, kernel, heads)
        for pair, kernel in cases(PAIRS, list(HEADS))
        for heads in HEADS[kernel]
    ],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [1, 3, 130, 300])
def test_queues(num_tokens: int, pair: Pair, kernel: Kernel, heads: int) -> None:
    """Of up to ten units per CTA."""
    check_kernel(random_call(pair, num_tokens, heads), kernel)


@pytest.mark.parametrize(("pair", "kernel"), EVERY_KERNEL, ids=str)
def test_every_kernel(pair: Pair, kernel: Kernel) -> None:
    """Also more ranks than tiles, and a last group of six heads."""
    sizes = ((5, 37, 165), (64, 128, 512), (70, 37, 165), (16, 1, 1), (16, 17, 0))
    for heads, window_width, width in sizes:
        call = random_call(pair, 9, heads, window_width=window_width, width=width)
        check_kernel(call, kernel)


@pytest.mark.parametrize("page_size", [1, 3, 32, 64, 100])
@pytest.mark.parametrize(("pair", "kernel"), EVERY_SHAPE, ids=str)
def test_page_sizes(pair: Pair, page_size: int, kernel: Kernel) -> None:
    check_kernel(random_call(pair, 5, 16, page_size=page_size), kernel)


@pytest.mark.parametrize("offset", [16, 48, 112])
@pytest.mark.parametrize(("pair", "kernel"), EVERY_SHAPE, ids=str)
def test_where_a_cache_begins(pair: Pair, offset: int, kernel: Kernel) -> None:
    """Off a cache line, where lanes that copy whole lines take fewer bytes of the first one."""
    call = random_call(pair, 5, 16)
    parts = []
    for part in call.parts:
        raw = part.cache.view(torch.uint8)
        room = raw.new_empty(raw.untyped_storage().nbytes() + 256)
        moved = room[-room.data_ptr() % 128 + offset :].as_strided(raw.shape, raw.stride())
        flat_pages(moved).copy_(flat_pages(raw))
        parts.append(replace(part, cache=moved.view(part.cache.dtype)))
    check_same_results(replace(call, parts=tuple(parts)), call, kernel)


@pytest.mark.parametrize(("pair", "kernel"), cases([("bf16", "bf16")], SHAPES), ids=str)
def test_bf16_rows_as_bytes(pair: Pair, kernel: Kernel) -> None:
    call = random_call(pair, 5, 16)
    parts = tuple(replace(part, cache=part.cache.view(torch.uint8)) for part in call.parts)
    check_same_results(replace(call, parts=parts), call, kernel)


@pytest.mark.parametrize(("pair", "kernel"), EVERY_KERNEL, ids=str)
def test_lengths(pair: Pair, kernel: Kernel) -> None:
    """Each on its own, and lengths of both caches against each other."""
    lens = [-5, 0, 1, 15, 16, 17, 63, 64, 65, 200, 513, 2**31 - 1, -(2**31)]
    call = random_call(pair, 2 * len(lens), 16, window_width=200, width=513)
    parts = [replace(call.parts[0], lens=ints(lens + lens[::-1], CUDA))]
    for part in call.parts[1:]:
        parts.append(replace(part, lens=ints(lens + [0] * len(lens), CUDA)))
    check_kernel(replace(call, parts=tuple(parts)), kernel)


@pytest.mark.parametrize("heads", [33, 100])
@pytest.mark.parametrize(("pair", "kernel"), EVERY_KERNEL, ids=str)
def test_empty_units_between_full_ones(pair: Pair, heads: int, kernel: Kernel) -> None:
    """Tokens without a length, or with holes alone; a queue may begin and end with some."""
    call = random_call(pair, 300, heads)
    empty = torch.rand(300, device=CUDA) < 0.6
    empty[140:280] = True
    holes = empty & (torch.arange(300, device=CUDA) % 2 == 0)
    parts = tuple(
        replace(
            part,
            lens=torch.where(empty & ~holes, 0, part.lens),
            indices=torch.where(holes[:, None], -1, part.indices),
        )
        for part in call.parts
    )
    call = replace(call, parts=parts)
    check_kernel(call, kernel)
    out, lse = run(call, kernel)
    assert not out[empty].any()
    assert bool(torch.isneginf(lse[empty]).all())


@pytest.mark.parametrize(
    ("pair", "kernel", "heads"),
    [
        *((*case, heads) for case in cases(PAIRS, ["wgmma32", "wgmma16"]) for heads in (5, 40)),
        *((*case, 64) for case in cases(PAIRS, ["wgmma64"])),
        *((*case, heads) for case in cases(PAIRS, ["wgmma64x2"]) for heads in (70, 128)),
    ],
    ids=str,
)
def test_many_small_units(pair: Pair, kernel: Kernel, heads: int) -> None:
    """A block each, some of them empty, some beyond f16: ten or more in a row for a CTA."""
    call = random_call(pair, 1400, heads, window_width=5, width=7)
    check_kernel(partly_beyond_f16(call), kernel)


@pytest.mark.parametrize(("pair", "kernel"), EVERY_SHAPE, ids=str)
def test_no_visible_row(pair: Pair, kernel: Kernel) -> None:
    call = random_call(pair, 3, 17)
    holes = tuple(
        replace(part, indices=torch.where(part.indices % 2 == 0, -1, 2**31 - 1).int())
        for part in call.parts
    )
    out, lse = run(replace(call, parts=holes), kernel)
    assert not out.any()
    assert bool(torch.isneginf(lse).all())


@pytest.mark.parametrize(("pair", "kernel"), EVERY_KERNEL, ids=str)
def test_rotation_of_the_output(pair: Pair, kernel: Kernel) -> None:
    """Of tokens beyond f16 too."""
    call = replace(random_call(pair, 150, 40), rope=random_rope(150, CUDA))
    check_kernel(partly_beyond_f16(call), kernel)


@pytest.mark.parametrize("heads", [65, 128])
@pytest.mark.parametrize("pair", QUANTISED, ids=str)
def test_what_f16_does_not_hold_for_both_of_a_pair(pair: Pair, heads: int) -> None:
    """Rows of the first and of the second CTA's share, and queries of one CTA."""
    call = random_call(pair, 300, heads, window_width=128, width=512)
    for part in call.parts:
        if record_of(part.cache) != "nvfp4":
            data_and_scales(part.cache)[1][:, 17] = 140
            part.indices[part.indices % 32 == 17] = -1
            part.indices[0::5, 40:50] = 17  # in the second half of a block
            part.indices[1::5, 5:9] = 17
    call.q[2::5, :60] *= 2.0**14
    call.q[3::5, 64:] *= 2.0**14
    check_columns(replace(call, scale=call.scale * 2.0**-14), "wgmma64x2")


def fill_row(cache: Tensor, row: int, byte: int) -> None:
    """One row of every page."""
    at = row_bytes_at(record_of(cache), cache.shape[1], row)
    flat_pages(cache)[:, ints(at, CUDA, torch.int64)] = byte


@pytest.mark.parametrize(("pair", "kernel"), EVERY_SHAPE, ids=str)
def test_bytes_of_other_rows(pair: Pair, kernel: Kernel) -> None:
    """Rows beside the selected ones, in the same tile, are 0xFF: NaN values under NaN scales."""
    call = random_call(pair, 5, 16)
    parts = []
    for part in call.parts:
        for row in range(0, part.cache.shape[1], 4):
            fill_row(part.cache, row, 0xFF)
        # 32 rows to a page: a slot that 4 divides is such a row.
        hidden = torch.where(part.indices % 4 == 0, -1, part.indices)
        parts.append(replace(part, indices=hidden.contiguous()))
    check_kernel(replace(call, parts=tuple(parts)), kernel)


@pytest.mark.parametrize(("pair", "kernel"), EVERY_KERNEL, ids=str)
def test_nan_stays_with_its_token_and_head(pair: Pair, kernel: Kernel) -> None:
    """A NaN row, last in its list, and a NaN query; tokens before and after are served as ever."""
    call = random_call(pair, 300, 40)
    last = call.parts[-1]
    fill_row(last.cache, 31, 0xFF)
    indices = torch.where(last.indices % 32 == 31, -1, last.indices)
    lens = last.lens.clone()
    indices[133, -1], lens[133] = 31, indices.shape[1]
    indices[140, 0], lens[140] = 0, 1
    call = replace(call, parts=(*call.parts[:-1], replace(last, indices=indices, lens=lens)))
    call.q[140, 20, 100] = math.nan
    out, lse = run(call, kernel)
    for nan in ((133,), (140, 20)):
        assert bool(out[nan].isnan().all())
        assert bool(lse[nan].isnan().all())
    exact, exact_lse = call.exact()
    for tensor, value in ((out, 0), (lse, 0), (exact, 0), (exact_lse, 0)):
        tensor[133], tensor[140, 20] = value, value
    assert_attention_close(out, lse, exact, exact_lse)


@pytest.mark.parametrize(("pair", "kernel"), EVERY_SHAPE, ids=str)
def test_zero_rows_and_queries(pair: Pair, kernel: Kernel) -> None:
    """Equal scores: the logarithm of the number of rows."""
    call = replace(random_call(pair, 4, 16), sink=None)
    check_kernel(replace(call, q=torch.zeros_like(call.q)), kernel)
    for part in call.parts:
        flat_pages(part.cache).zero_()
    check_kernel(call, kernel)


# A scale code, the e4m3 magnitudes under it, and the power of two that makes scores ordinary.
CODES = [
    (0, (64, 126), 120),
    (1, (64, 126), 119),
    (100, (0, 72), 27),
    (112, (0, 72), 15),
    (113, (0, 72), 14),
    (134, (0, 72), -7),
    (135, (0, 72), -8),
    (140, (0, 72), -13),
    (198, (0, 72), -71),
    (199, (0, 72), -72),
    (200, (0, 72), -73),
    (254, (0, 8), -118),
]


@pytest.mark.parametrize("kernel", SHAPES, ids=str)
@pytest.mark.parametrize(("code", "magnitudes", "exponent"), CODES, ids=lambda x: str(x))
@pytest.mark.parametrize("pair", QUANTISED[:5], ids=str)
def test_scale_codes(
    pair: Pair, code: int, magnitudes: tuple[int, int], exponent: int, kernel: Kernel
) -> None:
    """Inside and outside of 113 to 134, where f16 holds value times scale."""
    call = random_call(pair, 5, 16)
    parts = []
    for part in call.parts:
        if record_of(part.cache) == "nvfp4":  # its rows, of ordinary size, would be all that counts
            part = replace(part, lens=torch.zeros_like(part.lens))
        else:
            data, scales = data_and_scales(part.cache)
            refill(data, *magnitudes, signs=True)
            scales.fill_(code)
        parts.append(part)
    call.q[..., :ROPE] *= 2.0**exponent
    call.q[..., ROPE:] *= 2.0 ** (min(exponent, 0) if "fp8_ds_mla" in pair else exponent)
    check_columns(replace(call, parts=tuple(parts), sink=None), kernel)


@pytest.mark.parametrize("num_tokens", [9, 300])
@pytest.mark.parametrize("kernel", SHAPES, ids=str)
@pytest.mark.parametrize("pair", QUANTISED[:5], ids=str)
def test_a_few_scales_outside(pair: Pair, kernel: Kernel, num_tokens: int) -> None:
    """One row in 20, and there some groups: tiles of both kinds, and of both in one.

    300 tokens look at few rows each, so that some see no such row.
    """
    call = random_call(pair, num_tokens, 64, window_width=128, width=512)
    if num_tokens == 300:
        parts = (replace(part, lens=part.lens.clamp(max=9)) for part in call.parts)
        call = replace(call, parts=tuple(parts))
    for part in call.parts:
        if record_of(part.cache) == "nvfp4":
            continue
        _, scales = data_and_scales(part.cache)
        odd = ints([0, 1, 90, 112, 135, 140], CUDA)[torch.randint(6, scales.shape, device=CUDA)]
        chosen = torch.rand(scales.shape, device=CUDA) < 0.5
        chosen &= torch.rand(scales.shape[:2], device=CUDA)[..., None] < 0.05
        scales.copy_(torch.where(chosen, odd, scales.int()))
    call.q.mul_(2.0**-12)
    # The mma kernel has bf16 probabilities in such tiles; of few rows they do not average out.
    check_columns(call, kernel, rtol=8e-3)


@pytest.mark.parametrize("codes", [(0, 127), (1, 9), (118, 127)], ids=str)
@pytest.mark.parametrize("kernel", SHAPES, ids=str)
@pytest.mark.parametrize("pair", [("nvfp4", None), ("nvfp4", "nvfp4"), PAIR], ids=str)
def test_e4m3_scale_codes(pair: Pair, codes: tuple[int, int], kernel: Kernel) -> None:
    """Zero, subnormal and the largest scales of nvfp4, and the signed ones."""
    call = random_call(pair, 5, 16)
    for part in call.parts:
        if record_of(part.cache) == "nvfp4":
            refill(data_and_scales(part.cache)[1], *codes, signs=True)
    call.q.mul_(64.0 if codes[1] == 9 else 2.0**-9)
    check_kernel(call, kernel)


@pytest.mark.parametrize("exponent", [-110, -30, -9, 9, 14, 30, 110])
@pytest.mark.parametrize(("pair", "kernel"), EVERY_SHAPE, ids=str)
def test_queries_of_any_size(pair: Pair, kernel: Kernel, exponent: int) -> None:
    """Every head by a power of two of its own."""
    if kernel in WGMMA and exponent < -9 and "bf16" not in pair:
        pytest.skip("the scale of such a call is left to the mma kernel")
    call = random_call(pair, 5, 40)
    call.q.mul_(2.0**exponent)
    call.q[:, ::2].mul_(2.0**-5)
    check_kernel(replace(call, scale=call.scale * 2.0 ** (-exponent)), kernel)


@pytest.mark.parametrize("scale", [-(2.0**30), -0.05, 0.0, 1.0, 2.0**30])
@pytest.mark.parametrize("num_tokens", [5, 60, 100])
def test_any_softmax_scale(num_tokens: int, scale: float) -> None:
    """With queries for it."""
    call = random_call(PAIR, num_tokens, 64)
    if abs(scale) > 1:
        call.q.mul_(2.0**-35)
    check(replace(call, scale=scale), "cuda")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1)], ids=str)
def test_caches_without_a_page(empty: tuple[int, ...], kernel: Kernel) -> None:
    """As if every index were a hole."""
    call = random_call(PAIR, 3, 16)
    pageless, holes = list(call.parts), list(call.parts)
    for i in empty:
        pageless[i] = replace(call.parts[i], cache=call.parts[i].cache[:0])
        holes[i] = replace(call.parts[i], indices=torch.full_like(call.parts[i].indices, -1))
    calls = [replace(call, parts=tuple(parts)) for parts in (pageless, holes)]
    check_same_results(*calls, kernel)


@pytest.mark.parametrize("kernel", [1, "wgmma64", "wgmma32", "wgmma32x2", "wgmma16"], ids=str)
@pytest.mark.parametrize("pair", [("fp8_ds_mla", "fp8_ds_mla"), PAIR], ids=str)
def test_pages_far_apart(pair: Pair, kernel: Kernel) -> None:
    """Addresses past 2^32 and 2^35 bytes; a page's bytes come from a small cache."""
    stride, pages = 2**34 - 2**20, 3
    free, _ = torch.cuda.mem_get_info()
    if free < 1.1 * pages * stride:
        pytest.skip("needs 57 GB of free memory")
    call = random_call(pair, 5, 16)
    if "fp8_ds_mla" in pair:  # a scale beyond f16: wgmma's slow path addresses rows by itself
        data_and_scales(call.parts[0].cache)[1][:, 3] = 140
    call.q.mul_(2.0**-12)  # keeps such rows' scores apart from f32's rounding
    near = [replace(part, cache=part.cache[:pages]) for part in call.parts]
    pool = torch.empty(pages * stride, dtype=torch.uint8, device=CUDA)
    far = []
    for i, part in enumerate(near):
        shape, strides = part.cache.shape, (stride, part.cache.shape[2], 1)
        cache = pool.as_strided(shape, strides, i * 2**20)
        flat_pages(cache).copy_(flat_pages(part.cache))
        far.append(replace(part, cache=cache))
    call = replace(call, parts=tuple(near))
    check_kernel(call, kernel)
    check_same_results(replace(call, parts=tuple(far)), call, kernel)


@pytest.mark.parametrize(("num_tokens", "heads"), [(3, 5), (3, 16), (60, 64)])
def test_rows_off_16_bytes(num_tokens: int, heads: int) -> None:
    call = random_call(PAIR, num_tokens, heads)
    odd = torch.randn(num_tokens, heads, HEAD_DIM + 1, device=CUDA).bfloat16()
    call = replace(call, q=odd[..., 1:])
    check(call, "cuda")
    out = torch.full((num_tokens + 1, heads, HEAD_DIM + 1), 7.0, device=CUDA).bfloat16()
    lse = torch.full((num_tokens + 1, heads), 7.0, device=CUDA)
    (window, selected), q = call.parts, call.q
    dsv41ops.sparse_mla_decode_out(
        *(q, window.cache, window.indices, window.lens),
        *(selected.cache, selected.indices, selected.lens, call.sink),
        backend="cuda",
        out=out[..., 1:],
        lse=lse,
    )
    assert_attention_close(out[:-1, :, 1:], lse[:-1], *call.exact())
    assert bool((out[-1] == 7).all())
    assert bool((out[..., 0] == 7).all())


def test_two_streams() -> None:
    calls = [random_call(PAIR, T, 64, window_width=128, width=512) for T in (3, 150)]
    expected = [call.run(backend="cuda") for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[tuple[int, tuple[Tensor, Tensor]]] = []
    for _ in range(50):
        for i, (call, stream) in enumerate(zip(calls, streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append((i, call.run(backend="cuda")))
    torch.cuda.synchronize()
    for i, (out, lse) in results:
        assert_same_bits(out, expected[i][0])
        assert_same_bits(lse, expected[i][1])


def in_a_new_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    (result,) = results
    return result


def test_a_thread_that_never_used_cuda() -> None:
    """It may launch without having allocated anything, and may be the first to load a kernel."""
    from dsv41ops.kernels.cuda import sparse_mla_decode

    call = random_call(PAIR, 3, 16)
    window, selected = call.parts
    expected = call.run(backend="cuda")
    buffers = {name: torch.empty_like(t) for name, t in zip(("out", "lse"), expected, strict=True)}
    in_a_new_thread(
        lambda: dsv41ops.sparse_mla_decode_out(
            *(call.q, window.cache, window.indices, window.lens),
            *(selected.cache, selected.indices, selected.lens, call.sink),
            backend="cuda",
            **buffers,
        )
    )
    for function in (sparse_mla_decode._plan, sparse_mla_decode._kernel):
        function.cache_clear()
    for results in (buffers.values(), in_a_new_thread(lambda: call.run(backend="cuda"))):
        for got, want in zip(results, expected, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("widths", [(128, 512), (128, 0), (37, 165)], ids=str)
@pytest.mark.parametrize("heads", [5, 64])
def test_batch_invariant(heads: int, widths: tuple[int, int]) -> None:
    """Whatever the batch, of 1 to 300 tokens; without the flag it may not be."""
    window_width, width = widths
    call = random_call(PAIR, 300, heads, window_width=window_width, width=width)
    options: dict[str, Any] = {"batch_invariant": True, "backend": "cuda"}
    out, lse = call.run(**options)
    for tokens in ([0], [7], [299], [3, 4], list(range(20)), list(range(50, 200))):
        got, got_lse = call.select(tokens).run(**options)
        assert_same_bits(got, out[tokens])
        assert_same_bits(got_lse, lse[tokens])
    some = call.select([0, 7, 299])
    assert_attention_close(out[[0, 7, 299]], lse[[0, 7, 299]], *some.exact())


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_every_config_of_the_release(heads: int) -> None:
    """Steps of 1 to 140 tokens, on both sides of every change of the config."""
    call = random_call(PAIR, 140, heads, window_width=128, width=512)
    exact, exact_lse = call.exact()
    num_sms, _ = sms_and_capability(torch.device("cuda", 0))
    window_record, record = PAIR
    problem = DecodeProblem(1, heads, 128, 512, num_sms, window_record=window_record, record=record)
    configs = [cuda_config(replace(problem, num_tokens=T)) for T in range(1, 141)]
    changes = [T for T in range(1, 140) if configs[T - 1] != configs[T]]
    for num_tokens in sorted({1, *changes, *(T + 1 for T in changes), 140}):
        tokens = list(range(num_tokens))
        out, lse = call.select(tokens).run(backend="cuda")
        assert_attention_close(out, lse, exact[:num_tokens], exact_lse[:num_tokens])


def test_sinks_of_every_head() -> None:
    call = random_call(PAIR, 5, 17)
    sink = torch.tensor([-math.inf, math.inf, 3e38, -3e38, 0.0], device=CUDA)
    for kernel in KERNELS:
        given = replace(call, sink=sink.repeat(4)[:17].contiguous())
        assert_attention_close(*run(given, kernel), *given.exact())
