"""The Triton sparse MLA decode against float64 and the reference, in the interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.configs import DecodeConfig
from dsv41ops.kernels.triton import sparse_mla_decode as module
from dsv41ops.reference import attention
from tests.decode_calls import Call, Part, Rope, random_call, random_part, random_rope
from tests.reference.test_large_strides import far_apart, untouched
from tests.support import (
    HEAD_DIM,
    RECORDS,
    assert_attention_close,
    assert_same_bits,
    empty_cache,
    ints,
    random_cache,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SINKS = (-math.inf, math.inf, 3e38, -3e38, 1.5)


def arguments(call: Call, batch_invariant: bool = False) -> tuple:
    window = call.parts[0]
    extra = call.parts[1] if len(call.parts) == 2 else None
    compressed = (None,) * 3 if extra is None else (extra.cache, extra.indices, extra.lens)
    return (
        call.q,
        *(window.cache, window.indices, window.lens),
        *compressed,
        *(call.sink, call.scale, batch_invariant),
    )


def rope_arguments(call: Call) -> dict[str, Tensor]:
    return {} if call.rope is None else call.rope.arguments()


def run(call: Call, splits: int | None = None, **options: bool) -> tuple[Tensor, Tensor]:
    """In tiles of 32 rows, so that few rows make several blocks; None: as configured."""
    config = splits and DecodeConfig(16, 32, 4, splits)
    return module.launch_sparse_mla_decode(
        *arguments(call, **options), **rope_arguments(call), config=config or None
    )


def check(call: Call, splits: int | None = None) -> None:
    out, lse = run(call, splits)
    assert_attention_close(out, lse, *call.exact())
    expected, expected_lse = attention.sparse_mla_decode(*arguments(call), **rope_arguments(call))
    assert_attention_close(out, lse, expected, expected_lse, rtol=6e-3)
    assert torch.equal(out == 0, expected == 0) or call.sink is not None
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected_lse))


@pytest.mark.parametrize("compressed", [None, *RECORDS])
@pytest.mark.parametrize("window", RECORDS)
def test_every_record_pair(window: str, compressed: str | None) -> None:
    """Holes, repeats, indices outside the cache, lengths outside the width; padded pages."""
    splits = 1 if compressed == window else 3
    check(random_call((window, compressed), 2, 5, CPU), splits)


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 64, 65, 128])
def test_heads(heads: int) -> None:
    """As configured: tiles of 16 heads, of 64, and two of those."""
    check(random_call(("mxfp8", "nvfp4"), 1, heads, CPU))


@pytest.mark.parametrize(
    ("window_width", "width"), [(0, 0), (0, 5), (1, 0), (1, 1), (1, 65), (128, 64), (65, 192)]
)
def test_widths(window_width: int, width: int) -> None:
    parts = []
    for record, columns in (("mxfp8", window_width), ("fp8_ds_mla", width)):
        if columns:
            parts.append(random_part(record, 2, columns, CPU))
        else:
            cache = random_cache(record, 1, 4, CPU)
            none = torch.empty(2, 0, dtype=torch.int32)
            parts.append(Part(cache, none, ints([3, -1], CPU)))
    q = torch.randn(2, 3, HEAD_DIM).bfloat16()
    check(Call(q, tuple(parts), torch.randn(3)))


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("record", RECORDS)
def test_page_sizes_and_strides(record: str, page_size: int) -> None:
    """Aligned or not, near or far apart, pages give the same bits."""
    parts = []
    for pad in (0, 64, 6):
        torch.manual_seed(page_size)
        parts.append(
            random_part(record, 2, 40, CPU, num_pages=-(-70 // page_size), page_size=page_size,
                        pad=pad)
        )  # fmt: skip
    q = torch.randn(2, 3, HEAD_DIM).bfloat16()
    calls = [Call(q, (part,)) for part in parts]
    check(calls[0], 1)
    for other in calls[1:]:
        for a, b in zip(run(other, 1), run(calls[0], 1), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("splits", [2, 5, 32])
def test_split_counts(splits: int) -> None:
    """More splits than blocks, and lengths that leave some splits without any."""
    call = random_call(("mxfp8", "mxfp8"), 4, 3, CPU, window_width=64, width=97)
    call.parts[0].lens.copy_(ints([64, 0, 1, 0], CPU))
    call.parts[1].lens.copy_(ints([97, 97, 0, 0], CPU))
    check(call, splits)


def test_the_same_call_gives_the_same_bits() -> None:
    call = random_call(("mxfp8", "nvfp4"), 3, 5, CPU)
    for splits in (1, 3):
        for a, b in zip(run(call, splits), run(call, splits), strict=True):
            assert_same_bits(a, b)


def test_batch_invariant() -> None:
    """A token alone, among others and in another place: the same bits."""
    call = random_call(("mxfp8", "nvfp4"), 5, 3, CPU, window_width=64, width=512)
    out, lse = run(call, batch_invariant=True)
    for tokens in ([0], [4, 1]):
        alone = run(call.select(tokens), batch_invariant=True)
        assert_same_bits(alone[0], out[tokens])
        assert_same_bits(alone[1], lse[tokens])


def test_split_results_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens whose split results do not fit the workspace take turns; the bits stay."""
    call = random_call(("mxfp8", "nvfp4"), 5, 3, CPU)
    whole = run(call, 3)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 2 * 3 * 3 * HEAD_DIM * 4)
    for a, b in zip(run(call, 3), whole, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("pair", [*((r, None) for r in RECORDS), ("mxfp8", "nvfp4")], ids=str)
def test_nan_in_rows_nobody_selected(pair: tuple[str, str | None], splits: int) -> None:
    rows = torch.randn(13, HEAD_DIM).bfloat16()
    q = torch.randn(4, 5, HEAD_DIM).bfloat16()
    indices = torch.full((4, 64), -1, dtype=torch.int32)
    indices[0, 20:33] = torch.arange(1, 14)
    indices[1] = torch.arange(1, 65)  # past 13: stale, unwritten or out of the cache
    indices[3] = torch.arange(16, 80)
    indices[3, ::2] = -(2**31)
    indices[3, 1] = 2**31 - 1
    lens = ints([64, 13, 0, 64], CPU)

    def poisoned(fill: int) -> tuple[Tensor, Tensor]:
        parts = []
        for record in pair:
            if record is not None:
                cache, _ = empty_cache(record, 4, 4, CPU, pad=2, fill=fill)
                dsv41ops.kv_cache_insert(rows, torch.arange(1, 14), cache)
                parts.append(Part(cache, indices, lens))
        return run(Call(q, tuple(parts)), splits)

    out, lse = poisoned(0xFF)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(lse[:2]).all())
    assert bool(torch.isneginf(lse[2:]).all())
    for a, b in zip((out, lse), poisoned(0), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("record", RECORDS)
def test_a_selected_nan_row_stays_in_its_own_token(record: str, splits: int) -> None:
    values = torch.randn(7, HEAD_DIM).bfloat16()
    cache, _ = empty_cache(record, 2, 4, CPU, fill=0xFF)
    dsv41ops.kv_cache_insert(values, torch.arange(7), cache)
    indices = torch.full((3, 40), -1, dtype=torch.int32)
    indices[:, 0] = ints([1, 4, 0], CPU)
    indices[:, 39] = ints([2, 7, 6], CPU)
    q = torch.randn(3, 2, HEAD_DIM).bfloat16()
    out, lse = run(Call(q, (Part(cache, indices, ints([40] * 3, CPU)),)), splits)
    assert bool(torch.isfinite(out[[0, 2]]).all())
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isnan(lse[1]).all())


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks(splits: int) -> None:
    """One value of each kind, and two as large as the lse, a different one per head."""
    call = random_call(("mxfp8", "nvfp4"), 2, 7, CPU, sink=False)
    plain, lse = run(call, splits)
    sunk = replace(call, sink=torch.tensor([*SINKS, *lse[0, 5:].tolist()]))
    out, same_lse = run(sunk, splits)
    assert_same_bits(same_lse, lse)
    assert_attention_close(out, lse, *sunk.exact())
    assert_same_bits(out[:, [0, 3]], plain[:, [0, 3]])
    assert bool((out[:, [1, 2]] == 0).all())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("pair", [("mxfp8", None), ("fp8_ds_mla", "nvfp4")], ids=str)
def test_rows_without_keys(pair: tuple[str, str | None], splits: int) -> None:
    call = random_call(pair, 4, 6, CPU, sink=False)
    for part in call.parts:
        part.lens.copy_(ints([0, -5, part.indices.shape[1], 3], CPU))
        part.indices[2] = -1
        part.indices[3] = part.cache.shape[0] * part.cache.shape[1]  # one past the cache
    for sink in (None, torch.tensor([*SINKS, 0.0])):
        out, lse = run(replace(call, sink=sink), splits)
        assert_same_bits(out, torch.zeros_like(out))
        assert bool(torch.isneginf(lse).all())


def test_nothing_to_attend_to() -> None:
    """No tokens; a cache without pages."""
    call = random_call(("mxfp8", None), 0, 3, CPU)
    out, lse = run(call)
    assert out.shape == (0, 3, HEAD_DIM)
    assert lse.shape == (0, 3)
    cache = dsv41ops.new_kv_cache(0, 32, "mxfp8")
    q = torch.randn(2, 3, HEAD_DIM).bfloat16()
    part = Part(cache, ints([[0, -1]] * 2, CPU), ints([2, 1], CPU))
    out, lse = run(Call(q, (part,)))
    assert not bool(out.any())
    assert bool(torch.isneginf(lse).all())


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e8, -1e8])
def test_weights_add_up_to_one(scale: float, splits: int) -> None:
    """Two equal rows, one in each cache, weigh 1/2 each however large their score."""
    cache = dsv41ops.new_kv_cache(1, 4, "bf16")
    rows = torch.full((2, HEAD_DIM), 0.5).bfloat16()
    dsv41ops.kv_cache_insert(rows, torch.arange(2), cache)
    parts = tuple(Part(cache, ints([[row]], CPU), ints([1], CPU)) for row in (0, 1))
    call = Call(torch.full((1, 1, HEAD_DIM), 0.5).bfloat16(), parts, scale=scale)
    out, lse = run(call, splits)
    assert_same_bits(out, rows[:1, None])
    assert lse.item() == pytest.approx(call.exact()[1].item(), rel=1e-6)


@pytest.mark.parametrize("splits", [1, 3])
def test_strided_inputs(splits: int) -> None:
    """q, indices and results cut from bigger, poisoned buffers, off 16-byte boundaries."""
    call = random_call(("mxfp8", "nvfp4"), 3, 5, CPU)

    def apart(tensor: Tensor, poison: float) -> Tensor:
        shape = (tensor.shape[0] + 1, *tensor.shape[1:-1], tensor.shape[-1] + 7)
        view = tensor.new_full(shape, poison)[1:, ..., 3 : 3 + tensor.shape[-1]]
        return view.copy_(tensor)

    parts = tuple(replace(part, indices=apart(part.indices, 1)) for part in call.parts)
    strided = replace(call, q=apart(call.q, math.nan), parts=parts)
    expected = run(call, splits)
    buffers = [apart(torch.full((5, *t.shape[1:]), math.nan, dtype=t.dtype), 7) for t in expected]
    config = DecodeConfig(16, 32, 4, splits)
    module.launch_sparse_mla_decode(
        *arguments(strided), out=buffers[0], lse=buffers[1], config=config
    )
    for buffer, values in zip(buffers, expected, strict=True):
        assert_same_bits(buffer[:3], values)
        assert bool(torch.isnan(buffer[3:]).all())


@pytest.mark.parametrize(
    ("heads", "dtype", "splits"),
    [
        (17, torch.int32, 1),
        *((1, dtype, splits) for dtype in (torch.int32, torch.int64) for splits in (1, 3)),
    ],
)
def test_rotates_back(heads: int, dtype: torch.dtype, splits: int) -> None:
    """Positions that the table has and others, and a token without a row; of ``out`` alone."""
    call = random_call(("fp8_ds_mla", "nvfp4"), 5, heads, CPU)
    for part in call.parts:
        part.lens[2] = 0
    rope = random_rope(5, CPU, dtype)
    rope.positions[:] = ints([7, -1, 3, 50, 49], CPU, dtype)
    plain, plain_lse = run(call, splits)
    turning = replace(call, rope=rope)
    check(turning, splits)
    out, lse = run(turning, splits)
    assert_same_bits(lse, plain_lse)
    assert_same_bits(out[..., :448], plain[..., :448])
    assert_same_bits(out[1:4], plain[1:4])
    assert not bool((out[[0, 4], :, 448:] == plain[[0, 4], :, 448:]).all(-1).any())
    if dtype == torch.int64:
        rope.positions[0] = 2**32 + 7
        assert_same_bits(run(turning, splits)[0][0], plain[0])


@pytest.mark.parametrize("splits", [1, 2])
def test_rotated_values_are_rounded_once(splits: int) -> None:
    """A quarter turn swaps the f32 columns, and no rounding shows."""
    call = random_call(("mxfp8", None), 2, 3, CPU)
    quarter = torch.cat([torch.zeros(1, 32), torch.ones(1, 32)], 1)
    plain, _ = run(call, splits)
    out, _ = run(replace(call, rope=Rope(ints([0, 0], CPU), quarter)), splits)
    even, odd = plain[..., 448::2], plain[..., 449::2]
    assert torch.equal(out[..., 448:], torch.stack([odd, -even], -1).flatten(-2))
    nothing = Rope(ints([0, 0], CPU), quarter[:0])
    assert_same_bits(run(replace(call, rope=nothing), splits)[0], plain)


@pytest.mark.parametrize("record", RECORDS)
def test_c11_far_pages_and_index_rows(record: str) -> None:
    """Byte offsets past 2^31, in the cache and in the index buffer."""
    near = random_cache(record, 2, 4, CPU)
    span = near.stride(0) * near.element_size()
    stride = 2**31 + 32
    memory = untouched(stride + span, CPU)
    memory[:span] = near.view(torch.uint8).as_strided((span,), (1,))
    offset = (near.storage_offset() + near.stride(0)) * near.element_size()
    memory[stride:] = near.view(torch.uint8).as_strided((span,), (1,), offset)
    width = near.shape[2]
    shape, strides = (2, 4, width), (stride // near.element_size(), width, 1)
    far = memory.view(near.dtype).as_strided(shape, strides)
    indices, lens = ints([[1, 7, 4], [6, -1, 0]], CPU), ints([3, 3], CPU)
    q = torch.randn(2, 2, HEAD_DIM).bfloat16()
    expected = run(Call(q, (Part(near, indices, lens),)), 1)
    distant = far_apart(indices, 2**29 + 1)
    for a, b in zip(run(Call(q, (Part(far, distant, lens),)), 1), expected, strict=True):
        assert_same_bits(a, b)
