"""Public functions: sparse MLA and the merge of its results."""

from __future__ import annotations

from torch import Tensor

from dsv41ops.api.call import call
from dsv41ops.layouts import HEAD_DIM


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    cache: Tensor | None = None,
    topk_indices: Tensor | None = None,
    topk_lens: Tensor | None = None,
    attn_sink: Tensor | None = None,
    softmax_scale: float = HEAD_DIM**-0.5,
    batch_invariant: bool = False,
    backend: str = "auto",
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse MLA: one softmax over a token's window rows and its selected compressed rows.

    A cached row is both key and value. ``lse = log sum exp(scale * q . k)`` (natural logarithm,
    without the sink) and ``out = sum softmax * v / (1 + exp(sink - lse))``. Decode and prompt
    tokens mix freely: rows do not depend on each other.

    Args:
        q: ``[T, H, 512]`` bfloat16, H from 1 to 128, last dimension contiguous.
        swa_cache: Window cache, any record; see :func:`kv_cache_insert`.
        swa_indices: ``[T, W]`` int32 slots in ``swa_cache``. One below 0 or past the cache is
            skipped and never read.
        swa_lens: ``[T]`` int32; entries past it are never looked at. Clamped to ``0 .. W``.
        cache: Compressed cache, any record, or None with the next two for window-only layers.
        topk_indices: ``[T, K]`` int32 slots in ``cache``, as ``swa_indices``.
        topk_lens: ``[T]`` int32, as ``swa_lens``.
        attn_sink: ``[H]`` float32 logits that join the denominator only, or None. -inf has no
            effect, +inf gives 0.
        softmax_scale: Multiplies ``q . k``.
        batch_invariant: True: a row's bits depend on its own inputs and the static widths only,
            not on T or its neighbours.
        backend: On CUDA, who computes it: ``auto``, the fastest that can, or one that
            :func:`backends` lists, which runs or raises. On a CPU ``auto`` is the only one.
        positions: ``[T]`` int32 or int64, of the queries, or None with the next: the last 64
            columns of ``out`` are rotated back by these, in float32, before ``out`` is rounded. One
            below 0 or without a row in ``cos_sin`` leaves its token's as they are.
        cos_sin: ``[num_positions, 64]`` float32, as in :func:`rope_kv_cache_insert`.

    Returns:
        out ``[T, H, 512]`` bfloat16 and lse ``[T, H]`` float32, both contiguous. A token without
        a visible row: 0 and -inf.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above, or only some of
            ``cache``, ``topk_indices`` and ``topk_lens``, or of ``positions`` and ``cos_sin``, are
            given.
        UnsupportedError: The named backend cannot serve this call here; the message says why.
    """
    result: tuple[Tensor, Tensor] = call(
        "sparse_mla_decode",
        q,
        swa_cache,
        swa_indices,
        swa_lens,
        cache,
        topk_indices,
        topk_lens,
        attn_sink,
        softmax_scale,
        batch_invariant,
        backend,
        positions,
        cos_sin,
    )
    return result


def sparse_mla_decode_out(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    cache: Tensor | None = None,
    topk_indices: Tensor | None = None,
    topk_lens: Tensor | None = None,
    attn_sink: Tensor | None = None,
    softmax_scale: float = HEAD_DIM**-0.5,
    batch_invariant: bool = False,
    backend: str = "auto",
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    *,
    out: Tensor,
    lse: Tensor,
) -> None:
    """:func:`sparse_mla_decode` into a caller's buffers.

    Args:
        out: ``[>= T, H, 512]`` bfloat16, last dimension contiguous; rows past T are left alone.
        lse: ``[>= T, H]`` float32; rows past T are left alone. The others are as in the
            functional form.
    """
    call(
        "sparse_mla_decode_out",
        q,
        swa_cache,
        swa_indices,
        swa_lens,
        cache,
        topk_indices,
        topk_lens,
        attn_sink,
        softmax_scale,
        batch_invariant,
        backend,
        positions,
        cos_sin,
        out=out,
        lse=lse,
    )


def merge_attention_states(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results of several ranks, then apply the sink once.

    ``LSE = log sum exp(lse_i)``, ``out = sum exp(lse_i - LSE) * out_i / (1 + exp(sink - LSE))``.

    Args:
        outs: ``[N, T, H, 512]`` bfloat16 or float32, each computed without a sink.
        lses: ``[N, T, H]`` float32, natural logarithm. -inf: the rank had no row; its ``out`` is
            ignored, even NaN.
        attn_sink: ``[H]`` float32 or None, as in :func:`sparse_mla_decode`.

    Returns:
        out ``[T, H, 512]`` in the dtype of ``outs`` and lse ``[T, H]`` float32 without the sink.
        All ranks empty: 0 and -inf. One non-empty rank, no sink: its rows, bit for bit.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above.
    """
    result: tuple[Tensor, Tensor] = call("merge_attention_states", outs, lses, attn_sink)
    return result
