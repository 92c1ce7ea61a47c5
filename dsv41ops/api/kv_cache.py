"""Public functions: rows of the KV caches."""

from __future__ import annotations

from torch import Tensor

from dsv41ops.api.call import call


def kv_cache_insert(kv: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Encode latent rows into a paged cache.

    The record follows from the cache's dtype and last dimension (584 ``fp8_ds_mla``, 528
    ``mxfp8``, 288 ``nvfp4``, 1024 or bfloat16 ``bf16``). RoPE has been applied already.

    Args:
        kv: ``[T, 512]`` bfloat16, any row stride. A non-finite value makes its own scale group
            NaN and nothing else.
        slot_mapping: ``[T]`` int32 or int64 slots ``page * page_size + row``. A slot below 0 or
            past the cache means no write. Slots of one call are unique; of duplicates one row
            is left, possibly torn.
        cache: ``[pages, page_size, bytes]`` uint8 or ``[pages, page_size, 512]`` bfloat16, any
            page stride (``stride(0)``). Written: the bytes of the named rows only.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above.
    """
    call("kv_cache_insert", kv, slot_mapping, cache)


def rope_kv_cache_insert(
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int = 1,
) -> None:
    """Rotate the last 64 columns of latent rows, then :func:`kv_cache_insert`, in one launch.

    The pairs are interleaved: columns ``2i`` and ``2i + 1`` of the 64 become
    ``even * cos - odd * sin`` and ``even * sin + odd * cos``, in float32, each product rounded.
    The result is rounded to the dtype of ``kv``, then encoded.

    Args:
        kv: ``[T, 512]`` bfloat16 or float32, any row stride, not rotated yet. float32 rows are
            encoded as they are, without a rounding to bfloat16 but for what the record holds as
            bfloat16.
        positions: ``[T]`` int32 or int64, of the token that closes the row's state (or, of ratio
            1, of the token itself); what is applied is that of its group's first token,
            ``positions // compress_ratio * compress_ratio``. Below 0 or without a row in
            ``cos_sin``: no write.
        cos_sin: ``[num_positions, 64]`` float32, any row stride: 32 cosines, then 32 sines.
        slot_mapping: ``[T]`` int32 or int64, as in :func:`kv_cache_insert`.
        cache: As in :func:`kv_cache_insert`. Written: the bytes of the named rows only.
        compress_ratio: Tokens per state, at least 1.

    Raises:
        ValueError: An argument breaks the shapes, dtypes, strides or ranges above.
    """
    call("rope_kv_cache_insert", kv, positions, cos_sin, slot_mapping, cache, compress_ratio)


def kv_cache_gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Decode rows of a paged cache.

    Args:
        cache: As in :func:`kv_cache_insert`; only read.
        slots: ``[N]`` int32 or int64 slots ``page * page_size + row``.

    Returns:
        ``[N, 512]`` bfloat16, exact; zeros for a slot below 0 or past the cache.

    Raises:
        ValueError: An argument breaks the shapes, dtypes or strides above.
    """
    result: Tensor = call("kv_cache_gather", cache, slots)
    return result
