"""KV-cache records: how one 512-wide latent row lies in bytes, and how rows lie in a page.
The indexer's keys have records of their own, at the end.

A cache is ``[pages, page_size, record.row_bytes]`` uint8 (``[pages, page_size, 512]`` bfloat16 for
``bf16``). The last dimension names the record; ``stride(0)``, which may be larger than a page's
own bytes, is the only other thing that a reader has to know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIM = 512  # K = V = the latent
ROPE_DIM = 64  # the last 64 of the 512


@dataclass(frozen=True)
class KVRecord:
    """Byte layout of one cached latent row."""

    name: str
    row_bytes: int
    data_bytes: int
    scale_bytes: int
    scale_group: int  # values per scale; 0: unscaled
    split_page: bool = False  # all rows' data first, then all rows' scales
    page_multiple: int = 1  # pages are padded to a multiple of this many bytes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a cache tensor that holds this record."""
        return torch.bfloat16 if self.scale_bytes == 0 else torch.uint8

    @property
    def width(self) -> int:
        """Size of the last dimension of a cache tensor, in elements of ``dtype``."""
        return self.row_bytes // self.dtype.itemsize

    def page_bytes(self, page_size: int) -> int:
        """Bytes from one page to the next, padding included."""
        used = page_size * self.row_bytes
        return -(-used // self.page_multiple) * self.page_multiple


FP8_DS_MLA = KVRecord("fp8_ds_mla", 584, 576, 8, 64, split_page=True, page_multiple=576)
MXFP8 = KVRecord("mxfp8", 528, 512, 16, 32)
NVFP4 = KVRecord("nvfp4", 288, 256, 32, 16)
BF16 = KVRecord("bf16", 1024, 1024, 0, 0)

RECORDS = (FP8_DS_MLA, MXFP8, NVFP4, BF16)
ALIASES = {"auto": "fp8_ds_mla", "fp8": "fp8_ds_mla", "bfloat16": "bf16"}


def record_named(name: str) -> KVRecord:
    """The record of a KV-cache dtype name; ``auto``, ``fp8`` and ``bfloat16`` are aliases."""
    canonical = ALIASES.get(name, name)
    for record in RECORDS:
        if record.name == canonical:
            return record
    accepted = [record.name for record in RECORDS] + list(ALIASES)
    raise ValueError(f"kv_cache_dtype: expected one of {', '.join(accepted)}; got {name!r}")


_BY_LAST_DIMENSION = {
    **{(torch.uint8, record.row_bytes): record for record in RECORDS},
    **{(record.dtype, record.width): record for record in RECORDS},
}


def find_record(dtype: torch.dtype, width: int) -> KVRecord | None:
    """The record that a cache of this dtype and last dimension holds, or None."""
    return _BY_LAST_DIMENSION.get((dtype, width))


def record_of(cache: Tensor) -> KVRecord:
    """The record of a cache tensor that has passed the checks."""
    record = find_record(cache.dtype, int(cache.shape[-1]))
    assert record is not None
    return record


def new_kv_cache(
    num_pages: int,
    page_size: int,
    kv_cache_dtype: str = "auto",
    device: torch.device | str | None = None,
) -> Tensor:
    """Allocate a zeroed paged KV cache with the record's own page padding.

    Args:
        num_pages: Pages in the pool, at least 0.
        page_size: Rows per page, at least 1.
        kv_cache_dtype: ``fp8_ds_mla`` (also ``auto``, ``fp8``), ``mxfp8``, ``nvfp4`` or ``bf16``
            (also ``bfloat16``).
        device: Where the cache lives; torch's default device when None.

    Returns:
        ``[num_pages, page_size, width]`` uint8 or bfloat16; ``stride(0)`` is the padded page.

    Raises:
        ValueError: A size below its bound, or an unknown ``kv_cache_dtype``.
    """
    _check_sizes(num_pages, page_size)
    record = record_named(kv_cache_dtype)
    page_elements = record.page_bytes(page_size) // record.dtype.itemsize
    pool = torch.zeros(num_pages, page_elements, dtype=record.dtype, device=device)
    return pool.as_strided((num_pages, page_size, record.width), (page_elements, record.width, 1))


INDEX_HEAD_DIM = 128


@dataclass(frozen=True)
class IndexRecord:
    """Byte layout of one index key. A page holds all rows' data first, then all rows' scales."""

    name: str
    data_bytes: int
    scale_bytes: int
    scale_group: int  # values per scale
    split_page: bool = True

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


INDEX_FP8 = IndexRecord("fp8", 128, 4, 128)  # e4m3, one float32 scale
INDEX_MXFP4 = IndexRecord("mxfp4", 64, 4, 32)  # e2m1, even element low; UE8M0 scales

INDEX_RECORDS = {record.row_bytes: record for record in (INDEX_FP8, INDEX_MXFP4)}


def index_record_named(name: str) -> IndexRecord:
    """The record of an index-cache dtype name."""
    for record in INDEX_RECORDS.values():
        if record.name == name:
            return record
    accepted = ", ".join(record.name for record in INDEX_RECORDS.values())
    raise ValueError(f"index_cache_dtype: expected one of {accepted}; got {name!r}")


def new_index_cache(
    num_pages: int,
    page_size: int,
    index_cache_dtype: str = "fp8",
    device: torch.device | str | None = None,
) -> Tensor:
    """Allocate a zeroed paged cache of index keys.

    Args:
        num_pages: Pages in the pool, at least 0.
        page_size: Rows (states) per page, at least 1.
        index_cache_dtype: ``fp8`` (132 bytes per key) or ``mxfp4`` (68).
        device: Where the cache lives; torch's default device when None.

    Returns:
        ``[num_pages, page_size, row_bytes]`` uint8, contiguous.

    Raises:
        ValueError: A size below its bound, or an unknown ``index_cache_dtype``.
    """
    _check_sizes(num_pages, page_size)
    shape = (num_pages, page_size, index_record_named(index_cache_dtype).row_bytes)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _check_sizes(num_pages: int, page_size: int) -> None:
    if num_pages < 0:
        raise ValueError(f"num_pages: expected at least 0, got {num_pages}")
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
