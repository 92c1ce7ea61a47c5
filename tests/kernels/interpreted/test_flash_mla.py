"""The adapter of FlashMLA, around a stand-in that takes and gives what FlashMLA does, no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.kernels.flash_mla import library
from dsv41ops.kernels.flash_mla import sparse_mla_decode as module
from dsv41ops.reference import attention
from tests.decode_calls import Call, Part, random_call, random_part
from tests.kernels.interpreted.batches import assert_guards_intact, guarded
from tests.support import HEAD_DIM, assert_attention_close, assert_same_bits, ints, random_cache

CPU = torch.device("cpu")
PAIR = ("fp8_ds_mla", "fp8_ds_mla")
SCHEMA = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, "
    "Tensor? attn_sink, Tensor? tile_scheduler_metadata, Tensor? num_splits, Tensor? extra_kv, "
    "Tensor? extra_indices, Tensor? extra_topk_length, int d_v, float sm_scale, "
    "str? kv_format=None) -> (Tensor, Tensor, Tensor, Tensor)"
)


def checked(pool: Tensor, indices: Tensor, lens: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
    """A cache and what is selected from it, under FlashMLA's rules; as the op takes them."""
    num_pages, page_size, kv_heads, row_bytes = pool.shape
    assert (pool.dtype, kv_heads, row_bytes, pool.stride(1)) == (torch.uint8, 1, 584, 584)
    assert num_pages > 0
    assert (pool.data_ptr() | pool.stride(0)) % 16 == 0
    assert indices.shape[:2] == (num_tokens, 1)
    width = indices.shape[2]
    assert width > 0
    assert width % 64 == 0
    assert (indices.data_ptr() | indices.stride(0) * 4) % 8 == 0
    # It follows any other number, at a length or not.
    assert bool(((indices == -1) | ((indices >= 0) & (indices < num_pages * page_size))).all())
    assert lens.shape == (num_tokens,)
    assert lens.is_contiguous()
    assert bool(((lens >= 0) & (lens <= width)).all())
    return pool[:, :, 0], indices[:, 0], lens


def stand_in(  # type: ignore[no-untyped-def]
    q,
    kv,
    indices,
    lens,
    sink,
    plan,
    splits,
    extra_kv,
    extra_indices,
    extra_lens,
    d_v,
    scale,
    kind=None,
):
    num_tokens, one, heads, head_dim = q.shape
    assert num_tokens > 0
    assert (one, head_dim, d_v, kind) == (1, HEAD_DIM, HEAD_DIM, None)
    assert heads in (64, 128)
    assert (q.data_ptr() | q.stride(0) * 2 | q.stride(2) * 2) % 16 == 0
    assert plan is None
    assert splits is None
    assert sink is None or sink.shape == (heads,)
    extra = (extra_kv, extra_indices, extra_lens)
    if extra_kv is not None:
        extra = checked(*extra, num_tokens)
    window = checked(kv, indices, lens, num_tokens)
    out, lse = attention.sparse_mla_decode(q[:, 0], *window, *extra, sink, scale, False)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return out[:, None], lse[:, None].transpose(1, 2), ints([0], CPU), ints([0], CPU)


@pytest.fixture(autouse=True)
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., object]]:
    """In the place of the loaded library."""
    fake = torch.library.Library("flash_mla_stand_in", "DEF")
    fake.define(SCHEMA)
    fake.impl("sparse_decode_fwd", stand_in, "CPU")
    run = torch.ops.flash_mla_stand_in.sparse_decode_fwd
    monkeypatch.setattr(library, "_load", lambda: (run, None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield run
    fake._destroy()


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors start as NaN: padding has to be harmless."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def arguments(call: Call) -> tuple:
    window = call.parts[0]
    extra = call.parts[1] if len(call.parts) == 2 else None
    compressed = (None,) * 3 if extra is None else (extra.cache, extra.indices, extra.lens)
    return (
        *(call.q, window.cache, window.indices, window.lens, *compressed),
        *(call.sink, call.scale, False),
    )


def aligned(call: Call) -> Call:
    """With caches of its own pages' padding, which is all that FlashMLA takes."""
    parts = []
    for part in call.parts:
        pages, page_size, _ = part.cache.shape
        cache = random_cache("fp8_ds_mla", pages, page_size, CPU, pad=64)
        parts.append(replace(part, cache=cache))
    return replace(call, parts=tuple(parts))


def check(call: Call) -> None:
    held = [call.q, *(t for p in call.parts for t in (p.cache, p.indices, p.lens))]
    before = [tensor.clone() for tensor in held]
    with poisoned():
        out, lse = module.launch_sparse_mla_decode(*arguments(call))
    assert_attention_close(out, lse, *call.exact())
    assert out.is_contiguous()
    assert lse.is_contiguous()
    for tensor, copy in zip(held, before, strict=True):
        assert_same_bits(tensor, copy)


@pytest.mark.parametrize("heads", [1, 16, 63, 64, 65, 100, 128])
def test_heads_are_padded_inside(heads: int) -> None:
    check(aligned(random_call(PAIR, 2, heads, CPU)))


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("compressed", ["fp8_ds_mla", None])
def test_with_and_without(compressed: str | None, sink: bool) -> None:
    """Holes, repeats, indices outside the cache, lengths below 0 and past the width."""
    check(aligned(random_call(("fp8_ds_mla", compressed), 5, 64, CPU, sink=sink)))


@pytest.mark.parametrize(
    ("window_width", "width"), [(0, 0), (0, 5), (1, 0), (1, 1), (64, 128), (65, 192), (700, 513)]
)
def test_widths(window_width: int, width: int) -> None:
    call = random_call(PAIR, 2, 64, CPU, window_width=max(window_width, 1), width=max(width, 1))
    widths = (window_width, width)
    parts = [
        replace(part, indices=part.indices[:, :columns])
        for part, columns in zip(call.parts, widths, strict=True)
    ]
    check(aligned(replace(call, parts=tuple(parts))))


def test_strided_queries_and_indices() -> None:
    call = aligned(random_call(PAIR, 3, 64, CPU))
    wide = torch.randn(3, 128, HEAD_DIM).bfloat16()
    check(replace(call, q=wide[:, :64]))  # as TMA can read it
    odd = torch.randn(3, 64, HEAD_DIM + 1).bfloat16()[..., 1:]
    check(replace(call, q=odd))
    parts = []
    for part in call.parts:
        storage = guarded(3, part.indices.shape[1])
        parts.append(replace(part, indices=storage.copy_(part.indices)))
    check(replace(call, parts=tuple(parts)))


def test_one_row_pages_of_any_row_stride() -> None:
    part = random_part("fp8_ds_mla", 2, 9, CPU, page_size=1, num_pages=8)
    cache = random_cache("fp8_ds_mla", 8, 1, CPU)
    cache = cache.as_strided(cache.shape, (cache.stride(0), 7, 1))
    q = torch.randn(2, 64, HEAD_DIM).bfloat16()
    check(Call(q, (Part(cache, part.indices, part.lens),)))


def test_empty_rows() -> None:
    call = aligned(random_call(PAIR, 4, 10, CPU))
    parts = [
        replace(call.parts[0], lens=ints([0, 3, 0, 2], CPU)),
        replace(call.parts[1], lens=ints([0, 0, -4, 1], CPU)),
    ]
    parts[0].indices[3, 0] = 5
    parts[0].indices[1] = ints([-1, 10**9, -(2**31)] + [-7] * 34, CPU)
    call = replace(call, parts=tuple(parts))
    check(call)
    out, lse = module.launch_sparse_mla_decode(*arguments(call))
    assert torch.isneginf(lse).all(1).tolist() == [True, True, True, False]
    assert not out[:3].any()


def test_no_tokens() -> None:
    for heads in (3, 64):
        call = aligned(random_call(PAIR, 0, heads, CPU))
        out, lse = module.launch_sparse_mla_decode(*arguments(call))
        assert (out.shape, lse.shape) == ((0, heads, HEAD_DIM), (0, heads))


@pytest.mark.parametrize("heads", [5, 64])
def test_out_form_writes_the_callers_rows_only(heads: int) -> None:
    call = aligned(random_call(PAIR, 3, heads, CPU))
    storage = torch.full((6, heads + 1, HEAD_DIM), 7.0).bfloat16()
    out, lse = storage[:5, :heads], guarded(5, heads, torch.float32)
    module.launch_sparse_mla_decode(*arguments(call), out=out, lse=lse)
    assert_attention_close(out[:3], lse[:3], *call.exact())
    assert bool((out[3:] == 7).all())
    assert bool((lse[3:] == 7).all())
    assert bool((storage[:, heads] == 7).all())
    assert_guards_intact(lse)


@pytest.mark.parametrize("heads", [7, 64])
def test_many_tokens_take_turns(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 2 * 64 * HEAD_DIM * 4)
    check(aligned(random_call(PAIR, 5, heads, CPU)))


def test_first_run_in_a_capture_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warm", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = aligned(random_call(PAIR, 2, 100, CPU))
    with pytest.raises(RuntimeError, match="its kernels for 128 heads are not loaded yet, and a"):
        module.launch_sparse_mla_decode(*arguments(call))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    module.launch_sparse_mla_decode(*arguments(call))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    module.launch_sparse_mla_decode(*arguments(call))


def test_pool_of_the_package_is_taken_as_it_is() -> None:
    cache = dsv41ops.new_kv_cache(2, 7, "fp8_ds_mla")
    assert module._pages(cache).data_ptr() == cache.data_ptr()
    assert cache.stride(0) % 16 == 0
