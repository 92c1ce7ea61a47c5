"""The backend as an engine asks for it: names, types, page sizes and the builders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from dsv41ops.backend.arguments import require_int, require_states_per_page
from dsv41ops.backend.builder import FlashMLASparseDSV41MetadataBuilder
from dsv41ops.backend.layer_types import LayerType, layer_type
from dsv41ops.backend.metadata import SparseMLAMetadata
from dsv41ops.backend.window import SlidingWindowMetadataBuilder
from dsv41ops.layouts import HEAD_DIM, MXFP8, NVFP4, KVRecord, record_named

# (major, minor) as torch.cuda.get_device_capability() gives it; None: no GPU, the CPU reference.
Capability = Sequence[int] | None


class FlashMLASparseDSV41Backend:
    """Sparse MLA of DeepSeek-V4.1: a window cache and a compressed cache in one softmax."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",  # fp8_ds_mla
        "fp8",  # fp8_ds_mla
        "fp8_ds_mla",
        "mxfp8",
        "nvfp4",  # compressed caches; their window caches are mxfp8
        "bfloat16",
    ]

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE_DSV41"

    @staticmethod
    def get_builder_cls() -> type[FlashMLASparseDSV41MetadataBuilder]:
        """The builder of a compressed cache's metadata."""
        return FlashMLASparseDSV41MetadataBuilder

    @staticmethod
    def get_window_builder_cls() -> type[SlidingWindowMetadataBuilder]:
        """The builder of the window cache's metadata."""
        return SlidingWindowMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[SparseMLAMetadata]:
        return SparseMLAMetadata

    @classmethod
    def get_impl_cls(cls) -> type[object]:
        """There is none to build: raises NotImplementedError."""
        raise NotImplementedError(
            f"{cls.get_name()} has no per-layer implementation class: attention runs through the "
            "ops, torch.ops.dsv41.sparse_mla_decode and its neighbours"
        )

    @staticmethod
    def is_mla() -> bool:
        return True

    @staticmethod
    def is_sparse() -> bool:
        return True

    @staticmethod
    def supports_sink() -> bool:
        return True

    @staticmethod
    def supports_non_causal() -> bool:
        return True

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [HEAD_DIM]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether queries may have this dtype."""
        return dtype in cls.supported_dtypes

    @staticmethod
    def supports_compute_capability(capability: Capability) -> bool:
        return capability is None or capability[0] in (9, 10)

    @staticmethod
    def get_supported_kernel_block_sizes(capability: Capability = None) -> list[int]:
        """Tokens per compressed page that an engine should choose; the ops take any size."""
        return [64 if capability is not None and capability[0] == 9 else 128]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str) -> bool:
        """Whether caches may be of this dtype, under any name of it."""
        try:
            record_named(kv_cache_dtype)
        except ValueError:
            return False
        return True

    @staticmethod
    def get_kv_cache_record(kv_cache_dtype: str, compress_ratio: int) -> KVRecord:
        """The record of a layer's own cache, from the engine's one ``kv_cache_dtype``.

        Its ``name`` is the canonical one. ``nvfp4`` is a record of compressed caches: the window
        cache (ratio 0) beside them is ``mxfp8``.
        """
        record = record_named(kv_cache_dtype)
        if record is NVFP4 and layer_type(compress_ratio) is LayerType.SWA:
            return MXFP8
        return record

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int = HEAD_DIM,
        cache_dtype_str: str = "auto",
        compress_ratio: int = 1,
    ) -> tuple[int, int, int]:
        """``(pages, rows per page, elements per row)`` of a cache of this ratio, 0 for the window.

        A page of ``block_size`` tokens has ``block_size / compress_ratio`` rows, or ``block_size``
        in the window cache. Pages may lie further apart than their rows need:
        ``get_kv_cache_record(...).page_bytes(rows)`` says how far, ``dsv41ops.new_kv_cache``
        allocates them so.
        """
        require_int("num_blocks", num_blocks, 0)
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads: expected 1 (one shared latent), got {num_kv_heads}")
        if not cls.supports_head_size(head_size):
            raise ValueError(f"head_size: expected {HEAD_DIM}, got {head_size}")
        ratio = layer_type(compress_ratio).compress_ratio
        rows = require_states_per_page(block_size, max(ratio, 1))
        return num_blocks, rows, cls.get_kv_cache_record(cache_dtype_str, ratio).width
