"""What the backend answers an engine."""

from __future__ import annotations

import pytest
import torch

import dsv41ops
from dsv41ops.backend import (
    AttentionCGSupport,
    FlashMLASparseDSV41Backend,
    FlashMLASparseDSV41MetadataBuilder,
    SlidingWindowMetadataBuilder,
    SparseMLAMetadata,
    SparseMLAMetadataBuilder,
)
from dsv41ops.layouts import RECORDS

Backend = FlashMLASparseDSV41Backend


def test_name_and_flags() -> None:
    assert Backend.get_name() == "FLASHMLA_SPARSE_DSV41"
    assert Backend.is_mla() is True
    assert Backend.is_sparse() is True
    assert Backend.supports_sink() is True
    assert Backend.supports_non_causal() is True


def test_classes() -> None:
    assert Backend.get_builder_cls() is FlashMLASparseDSV41MetadataBuilder
    assert Backend.get_window_builder_cls() is SlidingWindowMetadataBuilder
    assert Backend.get_metadata_cls() is SparseMLAMetadata


def test_no_implementation_class() -> None:
    with pytest.raises(NotImplementedError, match=r"runs through the ops, torch\.ops\.dsv41"):
        Backend.get_impl_cls()


def test_query_dtypes() -> None:
    assert Backend.supported_dtypes == [torch.bfloat16]
    assert Backend.supports_dtype(torch.bfloat16)
    assert not Backend.supports_dtype(torch.float16)
    assert not Backend.supports_dtype(torch.float32)


def test_head_size() -> None:
    assert Backend.get_supported_head_sizes() == [512]
    assert Backend.supports_head_size(512)
    assert not Backend.supports_head_size(576)


def test_cache_dtypes() -> None:
    assert sorted(Backend.supported_kv_cache_dtypes) == [
        "auto", "bfloat16", "fp8", "fp8_ds_mla", "mxfp8", "nvfp4",
    ]  # fmt: skip
    assert all(Backend.supports_kv_cache_dtype(name) for name in Backend.supported_kv_cache_dtypes)
    assert Backend.supports_kv_cache_dtype("bf16")
    assert not Backend.supports_kv_cache_dtype("fp8_e5m2")
    assert not Backend.supports_kv_cache_dtype("")


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("name", "canonical", "width"),
    [
        ("auto", "fp8_ds_mla", 584),
        ("fp8", "fp8_ds_mla", 584),
        ("fp8_ds_mla", "fp8_ds_mla", 584),
        ("mxfp8", "mxfp8", 528),
        ("nvfp4", "nvfp4", 288),
        ("bfloat16", "bf16", 512),
    ],
)
def test_compressed_cache(name: str, canonical: str, width: int, ratio: int) -> None:
    assert Backend.get_kv_cache_record(name, ratio).name == canonical
    shape = Backend.get_kv_cache_shape(7, 128, 1, 512, name, compress_ratio=ratio)
    assert shape == (7, 128 // ratio, width)


@pytest.mark.parametrize(
    ("name", "canonical", "width"),
    [
        ("auto", "fp8_ds_mla", 584),
        ("mxfp8", "mxfp8", 528),
        ("nvfp4", "mxfp8", 528),  # the release's own pairing: 528 window, 288 compressed
        ("bfloat16", "bf16", 512),
    ],
)
def test_window_cache(name: str, canonical: str, width: int) -> None:
    assert Backend.get_kv_cache_record(name, 0).name == canonical
    shape = Backend.get_kv_cache_shape(7, 32, cache_dtype_str=name, compress_ratio=0)
    assert shape == (7, 32, width)


@pytest.mark.parametrize("record", [record.name for record in RECORDS])
def test_shape_is_what_new_kv_cache_allocates(record: str) -> None:
    """An engine that allocates by itself gets tensors that the ops read."""
    shape = Backend.get_kv_cache_shape(3, 64, cache_dtype_str=record, compress_ratio=2)
    cache = dsv41ops.new_kv_cache(3, 32, record)
    assert cache.shape == shape
    layout = Backend.get_kv_cache_record(record, 2)
    assert cache.dtype == layout.dtype
    assert cache.stride(0) * cache.element_size() == layout.page_bytes(32)


def test_shape_defaults_to_one_state_per_token() -> None:
    assert Backend.get_kv_cache_shape(2, 64) == (2, 64, 584)
    assert Backend.get_kv_cache_shape(0, 64) == (0, 64, 584)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": -1}, "num_blocks: expected at least 0, got -1"),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"num_kv_heads": 8}, "num_kv_heads: expected 1 .*got 8"),
        ({"head_size": 576}, "head_size: expected 512, got 576"),
        ({"cache_dtype_str": "fp8_e5m2"}, "kv_cache_dtype: expected one of .*got 'fp8_e5m2'"),
        ({"compress_ratio": 4}, "compress_ratio: expected 0, 1 or 2, got 4"),
        (
            {"block_size": 33, "compress_ratio": 2},
            "block_size: expected a multiple of compress_ratio = 2, got 33",
        ),
    ],
)
def test_shape_errors(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Backend.get_kv_cache_shape(**{"num_blocks": 2, "block_size": 64, **arguments})


@pytest.mark.parametrize(
    ("capability", "supported", "block_size"),
    [
        ((9, 0), True, 64),
        ((10, 0), True, 128),
        ((10, 3), True, 128),
        (None, True, 128),  # no GPU: the CPU reference
        ((8, 0), False, 128),
        ((12, 0), False, 128),
    ],
)
def test_compute_capability(capability: tuple | None, supported: bool, block_size: int) -> None:
    assert Backend.supports_compute_capability(capability) is supported
    assert Backend.get_supported_kernel_block_sizes(capability) == [block_size]


def test_capture_levels_are_ordered() -> None:
    levels = AttentionCGSupport
    assert levels.NEVER < levels.UNIFORM_SINGLE_TOKEN_DECODE < levels.UNIFORM_BATCH < levels.ALWAYS
    assert len(levels) == 4
    assert min(levels.ALWAYS, levels.UNIFORM_BATCH) is levels.UNIFORM_BATCH


def test_capture_support_of_the_builders() -> None:
    assert SparseMLAMetadataBuilder.get_cudagraph_support() is AttentionCGSupport.UNIFORM_BATCH
    for builder in (Backend.get_builder_cls(), Backend.get_window_builder_cls()):
        assert builder.get_cudagraph_support() is AttentionCGSupport.ALWAYS
        assert builder.supports_non_causal_multi_token_decode
        assert builder.supports_non_causal_multi_token_dcp
