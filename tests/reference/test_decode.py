"""Sparse MLA decode in float64: shapes (C21), masks (C03, C15), lse (C16, C17), sinks (C20)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsv41ops
from tests.contract.inputs import rope_table
from tests.decode_calls import PAIRS, Call, Part, Rope, random_call, random_rope
from tests.support import (
    HEAD_DIM,
    RECORDS,
    SCALE,
    assert_attention_close,
    assert_same_bits,
    empty_cache,
    ints,
    random_cache,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = (1, 8, 12, 32, 64, 96, 128)
WIDTHS = (1, 5, 64, 65, 192, 640, 1152)
SINKS = {
    "none": None,
    "minus_inf": -math.inf,
    "inf": math.inf,
    "huge": 3e38,
    "minus_huge": -3e38,
    "ordinary": 1.5,
}


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_record_pair(
    pair: tuple[str, str | None], num_tokens: int, device: torch.device
) -> None:
    random_call(pair, num_tokens, 12, device).check()


# Every width and every head count, and each pair of neighbours in the two lists once.
@pytest.mark.parametrize(
    ("width", "heads"),
    [*zip(WIDTHS, HEADS, strict=True), *zip(WIDTHS, HEADS[::-1], strict=True)],
)
def test_c21_widths_and_head_counts(width: int, heads: int, device: torch.device) -> None:
    call = random_call(("mxfp8", "nvfp4"), 3, heads, device, width=width)
    call.check()
    out, lse = call.run()
    assert out.shape == (3, heads, HEAD_DIM)
    assert lse.shape == (3, heads)


@pytest.mark.parametrize("width", [0, *WIDTHS])
def test_c21_window_width(width: int, device: torch.device) -> None:
    """The window alone, of any width, odd ones and none at all included."""
    num_tokens = 3
    if width == 0:
        cache = random_cache("mxfp8", 2, 4, device)
        none = torch.empty(num_tokens, 0, dtype=torch.int32, device=device)
        q = torch.randn(num_tokens, 8, HEAD_DIM, device=device).bfloat16()
        Call(q, (Part(cache, none, ints([5, 0, -1], device)),)).check()
    else:
        random_call(("mxfp8", None), num_tokens, 8, device, window_width=width).check()


@pytest.mark.parametrize("heads", [8, 12, 64])
def test_c21_neighbouring_heads_do_not_matter(heads: int, device: torch.device) -> None:
    """q as a slice of 128 heads whose others are NaN; the sink has this rank's length only."""
    call = random_call(("mxfp8", "nvfp4"), 3, heads, device)
    wide = torch.full((3, 128, HEAD_DIM), math.nan, device=device).bfloat16()
    wide[:, :heads] = call.q
    sliced = replace(call, q=wide[:, :heads])
    assert not sliced.q.is_contiguous()
    sliced.check()
    for a, b in zip(sliced.run(), call.run(), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("heads", [1, 64])
def test_strided_inputs(heads: int, device: torch.device) -> None:
    """Index rows, lengths' and q's rows cut from bigger, poisoned buffers: same bits."""
    call = random_call(("mxfp8", "nvfp4"), 3, heads, device)

    def apart(tensor: Tensor, poison: float) -> Tensor:
        """The same values with a longer row stride and a storage offset."""
        shape = (tensor.shape[0] + 1, *tensor.shape[1:-1], tensor.shape[-1] + 7)
        big = torch.full(shape, poison, dtype=tensor.dtype, device=device)
        view = big[1:, ..., 3 : 3 + tensor.shape[-1]]
        view.copy_(tensor)
        return view

    parts = tuple(replace(part, indices=apart(part.indices, 1)) for part in call.parts)
    strided = replace(call, q=apart(call.q, math.nan), parts=parts)
    for a, b in zip(strided.run(), call.run(), strict=True):
        assert_same_bits(a, b)
    twice = torch.stack([call.q, torch.full_like(call.q, math.nan)], 1).flatten(0, 1)
    for a, b in zip(replace(call, q=twice[::2]).run(), call.run(), strict=True):
        assert_same_bits(a, b)


def test_c03_holes_below_the_length(device: torch.device) -> None:
    """64 real rows (1, 2, 0, …) and 64 holes, interleaved: nothing but the real ones counts."""
    row = torch.zeros(HEAD_DIM, device=device)
    row[0], row[1] = 1, 2
    cache = dsv41ops.new_kv_cache(4, 32, "mxfp8", device)
    dsv41ops.kv_cache_insert(
        row.bfloat16().expand(128, HEAD_DIM), torch.arange(128, device=device), cache
    )
    q = torch.zeros(1, 1, HEAD_DIM, device=device)
    q[0, 0, 0] = 1
    indices = torch.arange(128, dtype=torch.int32, device=device)
    indices[1::2] = -1
    lens = ints([128], device)
    out, lse = dsv41ops.sparse_mla_decode(
        q.bfloat16(), cache, indices[None], lens, softmax_scale=1.0
    )
    assert out[0, 0, :2].tolist() == [1.0, 2.0]
    assert not bool(out[0, 0, 2:].any())
    assert lse.item() == pytest.approx(1 + math.log(64), abs=1e-5)


def test_a_row_selected_twice_counts_twice(device: torch.device) -> None:
    """Also once through each cache: no set semantics anywhere."""
    cache = random_cache("mxfp8", 1, 4, device)
    q = torch.randn(1, 4, HEAD_DIM, device=device).bfloat16()
    once = Part(cache, ints([[2]], device), ints([1], device))
    twice = Part(cache, ints([[2, 2]], device), ints([2], device))
    _, lse = Call(q, (once,)).run()
    for parts in ((twice,), (once, once)):
        _, doubled = Call(q, parts).run()
        torch.testing.assert_close(doubled, lse + math.log(2), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_c15_nan_in_rows_nobody_selected(
    pair: tuple[str, str | None], batch_invariant: bool, device: torch.device
) -> None:
    """13 rows in pages of 4, slot 0 unselected: on an all-0xFF pool as on an all-zero one.

    Row 0 has a -1 tail, row 1 stale ids past its length, row 2 selects nothing, row 3 only ids
    outside the cache.
    """
    rows = torch.randn(14, HEAD_DIM, device=device).bfloat16()
    q = torch.randn(4, 64, HEAD_DIM, device=device).bfloat16()
    indices = torch.full((4, 64), -1, dtype=torch.int32, device=device)
    indices[0, 20:33] = torch.arange(1, 14, dtype=torch.int32, device=device)
    indices[1] = ints(range(1, 65), device)  # past 13: stale, unwritten or out of the cache
    indices[3] = ints(range(16, 80), device)
    indices[3, ::2] = -(2**31)
    indices[3, 1] = 2**31 - 1
    lens = ints([64, 13, 0, 64], device)

    def run(fill: int) -> tuple[Tensor, Tensor]:
        parts = []
        for record in pair:
            if record is not None:
                cache, _ = empty_cache(record, 4, 4, device, pad=2, fill=fill)
                slots = torch.arange(14, device=device)
                dsv41ops.kv_cache_insert(rows[1:], slots[1:], cache)
                parts.append(Part(cache, indices, lens))
        return Call(q, tuple(parts)).run(batch_invariant=batch_invariant)

    poisoned, clean = run(0xFF), run(0)
    assert bool(torch.isfinite(poisoned[0]).all())
    assert bool(torch.isfinite(poisoned[1][:2]).all())
    assert bool(torch.isneginf(poisoned[1][2:]).all())
    for a, b in zip(poisoned, clean, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("record", RECORDS)
def test_c15_a_selected_nan_row_stays_in_its_own_token(record: str, device: torch.device) -> None:
    """NaN that is selected must show, and in that token only."""
    cache = random_cache(record, 2, 4, device)
    poisoned, _ = empty_cache(record, 2, 4, device, fill=0xFF)
    values = dsv41ops.kv_cache_gather(cache, torch.arange(7, device=device))
    dsv41ops.kv_cache_insert(values, torch.arange(7, device=device), poisoned)
    q = torch.randn(3, 8, HEAD_DIM, device=device).bfloat16()
    indices = ints([[1, 2, 3], [4, 7, 5], [0, 6, -1]], device)
    out, lse = dsv41ops.sparse_mla_decode(q, poisoned, indices, ints([3, 3, 3], device))
    assert bool(torch.isfinite(out[[0, 2]]).all())
    assert bool(torch.isfinite(lse[[0, 2]]).all())
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isnan(lse[1]).all())


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("pair", [("mxfp8", None), ("mxfp8", "nvfp4")], ids=str)
def test_c16_a_row_without_keys(
    pair: tuple[str, str | None], sink: str, device: torch.device
) -> None:
    call = random_call(pair, 4, 8, device, sink=False)
    parts = []
    for part in call.parts:
        rows = part.cache.shape[0] * part.cache.shape[1]
        part.lens.copy_(ints([0, -5, part.indices.shape[1], 3], device))
        part.indices[2] = -1
        part.indices[3] = rows  # one past the cache
        parts.append(part)
    logit = SINKS[sink]
    sinks = None if logit is None else torch.full((8,), logit, device=device)
    out, lse = replace(call, parts=tuple(parts), sink=sinks).run()
    assert_same_bits(out, torch.zeros_like(out))
    assert bool(torch.isneginf(lse).all())


def test_c16_a_cache_without_pages(device: torch.device) -> None:
    cache = dsv41ops.new_kv_cache(0, 32, "mxfp8", device)
    q = torch.randn(2, 8, HEAD_DIM, device=device).bfloat16()
    out, lse = dsv41ops.sparse_mla_decode(
        q, cache, ints([[0, -1]] * 2, device), ints([2, 1], device)
    )
    assert not bool(out.any())
    assert bool(torch.isneginf(lse).all())


def test_one_part_empty_is_the_other_alone(device: torch.device) -> None:
    call = random_call(("mxfp8", "nvfp4"), 3, 12, device)
    call.parts[0].lens.zero_()
    call.check()
    call.parts[0].lens.fill_(37)
    call.parts[1].lens.zero_()
    call.check()


def test_c17_lse_is_natural_f32_per_token_and_head(device: torch.device) -> None:
    """Two query tokens of a request and one of another, 64 distinct heads, sink not included."""
    call = random_call(("mxfp8", "nvfp4"), 3, 64, device)
    gains = torch.linspace(0.2, 3.0, 64, device=device)
    call = replace(call, q=(call.q * gains[:, None]).bfloat16(), sink=None)
    _, lse = call.run()
    assert lse.dtype == torch.float32
    assert lse.shape == (3, 64)
    _, expected = call.exact()
    assert len(set(expected.flatten().tolist())) == 3 * 64
    torch.testing.assert_close(lse.double().cpu(), expected, rtol=2e-6, atol=2e-5)
    with_sink = replace(call, sink=torch.randn(64, device=device) + 4)
    assert_same_bits(with_sink.run()[1], lse)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_c20_sinks(batch_invariant: bool, device: torch.device) -> None:
    """One value of each kind, in one call, a different one per head."""
    heads = 8
    call = random_call(("mxfp8", "nvfp4"), 3, heads, device, sink=False)
    plain, lse = call.run(batch_invariant=batch_invariant)
    values = [-math.inf, math.inf, 3e38, -3e38, *lse[0, 4:].tolist()]  # as large as the lse
    sunk = replace(call, sink=torch.tensor(values, device=device))
    out, same_lse = sunk.run(batch_invariant=batch_invariant)
    assert_same_bits(same_lse, lse)
    assert_attention_close(out, same_lse, *sunk.exact())
    assert_same_bits(out[:, [0, 3]], plain[:, [0, 3]])
    assert bool((out[:, [1, 2]] == 0).all())
    torch.testing.assert_close(out[0, 4:], plain[0, 4:] / 2, rtol=2**-7, atol=0)


@pytest.mark.parametrize("logit", [30.0, -30.0, 88.0, -88.0, 1e4, -1e4])
def test_c20_sinks_far_from_the_lse(logit: float, device: torch.device) -> None:
    call = random_call(("mxfp8", None), 3, 8, device, sink=False)
    sunk = replace(call, sink=torch.full((8,), logit, device=device))
    out, lse = sunk.run()
    expected, expected_lse = sunk.exact()
    if logit > 80:  # below what bf16 holds of 1e-38 · v
        assert bool((out.abs() < 1e-30).all())
    else:
        assert_attention_close(out, lse, expected, expected_lse)


@pytest.mark.parametrize("scale", [0.0, 1.0, -SCALE])
def test_softmax_scale(scale: float, device: torch.device) -> None:
    """Zero and negative scales are scales."""
    replace(random_call(("mxfp8", "nvfp4"), 3, 8, device), scale=scale).check()


def test_scores_of_thousands(device: torch.device) -> None:
    """The softmax is stabilised; f32 rounds such scores by up to 1e-3, and so the weights."""
    call = replace(random_call(("mxfp8", "nvfp4"), 3, 8, device, sink=False), scale=40.0)
    out, lse = call.run()
    expected, expected_lse = call.exact()
    assert expected_lse.abs().median() > 1000
    assert_attention_close(out, lse, expected, expected_lse, rtol=6e-3)


@pytest.mark.parametrize("scale", [1e4, 1e8, -1e8])
def test_weights_add_up_to_one(scale: float, device: torch.device) -> None:
    """Where f32 holds ln 2 no longer beside the score: two equal rows still weigh 1/2 each."""
    cache = dsv41ops.new_kv_cache(1, 4, "bf16", device)
    rows = torch.full((2, HEAD_DIM), 0.5, device=device).bfloat16()
    dsv41ops.kv_cache_insert(rows, torch.arange(2, device=device), cache)
    q = torch.full((1, 1, HEAD_DIM), 0.5, device=device).bfloat16()
    call = Call(q, (Part(cache, ints([[0, 1]], device), ints([2], device)),), scale=scale)
    out, lse = call.run()
    assert_same_bits(out, rows[:1, None])
    assert lse.item() == pytest.approx(call.exact()[1].item(), rel=1e-6)


def test_uninitialised_memory_does_not_matter(device: torch.device) -> None:
    """torch's deterministic mode fills empty tensors with NaN."""
    calls = [random_call(("mxfp8", "nvfp4"), num_tokens, 12, device) for num_tokens in (0, 1, 3)]
    for call in calls:
        call.parts[0].lens[2:] = 0
        call.parts[1].lens[2:] = 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for call in calls:
            call.check()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("extra_rows", [0, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_out_form_writes_the_same_bits(
    num_tokens: int, extra_rows: int, device: torch.device
) -> None:
    """Rows past T keep what they had."""
    call = random_call(("mxfp8", "nvfp4"), num_tokens, 12, device)
    window, extra = call.parts
    for batch_invariant in (False, True):
        expected = call.run(batch_invariant=batch_invariant)
        rows = num_tokens + extra_rows
        out = torch.full((rows, 12, HEAD_DIM), math.nan, device=device).bfloat16()
        lse = torch.full((rows, 12), math.nan, device=device)
        written = dsv41ops.sparse_mla_decode_out(
            call.q, window.cache, window.indices, window.lens,
            extra.cache, extra.indices, extra.lens, call.sink,
            batch_invariant=batch_invariant, out=out, lse=lse,
        )  # fmt: skip
        assert written is None
        for buffer, functional in zip((out, lse), expected, strict=True):
            assert_same_bits(buffer[:num_tokens], functional)
            assert bool(torch.isnan(buffer[num_tokens:]).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("pair", [("fp8_ds_mla", None), ("mxfp8", "nvfp4")], ids=str)
def test_rotates_back(
    pair: tuple[str, str | None], num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(pair, num_tokens, 12, device)
    replace(call, rope=random_rope(num_tokens, device, dtype)).check()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_not_rotated_back(batch_invariant: bool, device: torch.device) -> None:
    """lse, the other columns, tokens without a known position; a token without a row is 0."""
    call = random_call(("mxfp8", "nvfp4"), 6, 12, device)
    for part in call.parts:
        part.lens[2] = 0
    positions = ints([0, -1, 3, 50, 2**40, 49], device, torch.int64)
    turning = replace(call, rope=Rope(positions, rope_table(50, device)))
    plain, plain_lse = call.run(batch_invariant=batch_invariant)
    out, lse = turning.run(batch_invariant=batch_invariant)
    assert_attention_close(out, lse, *turning.exact())
    assert_same_bits(lse, plain_lse)
    assert_same_bits(out[..., :448], plain[..., :448])
    assert_same_bits(out[1:5], plain[1:5])
    assert_same_bits(out[2], torch.zeros_like(out[2]))
    assert not bool((out[[0, 5], :, 448:] == plain[[0, 5], :, 448:]).all(-1).any())
    empty = replace(call, rope=Rope(positions, rope_table(50, device)[:0]))
    assert_same_bits(empty.run(batch_invariant=batch_invariant)[0], plain)


def test_rotated_values_are_rounded_once(device: torch.device) -> None:
    """A quarter turn swaps the f32 columns, and no rounding shows."""
    call = random_call(("mxfp8", "nvfp4"), 2, 3, device)
    quarter = torch.cat([torch.zeros(1, 32), torch.ones(1, 32)], 1).to(device)
    plain, _ = call.run(batch_invariant=True)
    out, _ = replace(call, rope=Rope(ints([0, 0], device), quarter)).run(batch_invariant=True)
    even, odd = plain[..., 448::2], plain[..., 449::2]
    assert torch.equal(out[..., 448:], torch.stack([odd, -even], -1).flatten(-2))


def test_compressed_arguments_come_together(device: torch.device) -> None:
    call = random_call(("mxfp8", "nvfp4"), 1, 8, device)
    window, extra = call.parts
    given = {"cache": extra.cache, "topk_indices": extra.indices, "topk_lens": extra.lens}
    for names in itertools.chain.from_iterable(itertools.combinations(given, n) for n in (1, 2)):
        some = {name: given[name] for name in names}
        with pytest.raises(ValueError, match=r"cache|topk"):
            dsv41ops.sparse_mla_decode(call.q, window.cache, window.indices, window.lens, **some)
