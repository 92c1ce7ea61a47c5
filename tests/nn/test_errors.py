"""Wrong arguments are named, with what was expected and what came."""

from __future__ import annotations

import pytest
import torch

from dsv41ops.nn import CompressedCache, Selection, SparseMLAAttention, StepMetadata
from tests.nn.layers import HIDDEN, geometry, metadata_of, mixed_steps

STEP = mixed_steps(torch.float32)[0]
T = len(STEP.x)


def metadata(**changes: object) -> StepMetadata:
    return metadata_of(STEP, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("window", {"compress_ratio": 3}, "compress_ratio: expected 0, 1 or 2, got 3"),
        ("window", {"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        ("window", {"num_swa_pages": -1}, "num_swa_pages: expected at least 0, got -1"),
        ("window", {"num_drafts": -1}, "num_drafts: expected at least 0, got -1"),
        ("window", {"o_groups": 3}, "o_groups: expected a divisor of 4 heads, got 3"),
        ("window", {"swa_cache_dtype": "int4"}, "kv_cache_dtype: expected one of .* got 'int4'"),
        ("window", {"is_kv_source": True}, "is_kv_source: expected False for compress ratio 0"),
        ("window", {"is_index_source": True}, "is_index_source: expected False for compress"),
        ("c2a source", {"is_index_source": False}, "is_index_source: expected True for a kv"),
        ("c2a source", {"max_requests": 0}, "max_requests: expected at least 1, got 0"),
        ("c2a source", {"block_size": 5}, "block_size: expected a multiple of compress ratio 2"),
        ("c1a source", {"index_cache_dtype": "fp4"}, "index_cache_dtype: .* got 'fp4'"),
    ],
)
def test_geometry(kind: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        geometry(kind, **changes)


def test_ring_capacity() -> None:
    """A power of two, at least 2 more than the drafts."""
    capacities = [geometry("c2a source", num_drafts=n).ring_capacity for n in range(8)]
    assert capacities == [2, 4, 4, 8, 8, 8, 8, 16]


def selection() -> Selection:
    rows = torch.full((T, 5), -1, dtype=torch.int32)
    return Selection(rows, rows, torch.zeros(T, dtype=torch.int32), None)


def cache() -> CompressedCache:
    source = SparseMLAAttention(geometry("c2a source")).compressed_cache
    assert source is not None
    return source


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("window", {"x": STEP.x[:, 0, :-1]}, rf"x: expected \[T, {HIDDEN}\] torch.float32, got"),
        ("window", {"x": STEP.x[:, 0].bfloat16()}, "x: expected .* got .* torch.bfloat16"),
        ("window", {"x": STEP.x}, "x: expected .* got .*7, 48"),
        ("window", {"source": cache()}, "source: expected None, got a CompressedCache"),
        ("c2a source", {"source": cache()}, "source: expected None, got a CompressedCache"),
        ("c2a reuse", {"selection": selection()}, "source: expected the kv source's .* got None"),
        ("c2a reuse", {"source": cache()}, "selection: expected the last index source's, got"),
        ("c2a source", {"metadata": metadata(block_table_c2a=None)}, "block_table_c2a .* got None"),
        ("c1a source", {"metadata": metadata(block_table_c1a=None)}, "block_table_c1a .* got None"),
        ("c1a source", {"metadata": metadata(compressed_cos_sin=None)}, "compressed_cos_sin"),
        ("c2a source", {"metadata": metadata(request_slots=None)}, "ring_slots: expected"),
        ("window", {"x": STEP.x[1:, 0]}, "positions: expected|slot_mapping: expected"),
    ],
)
def test_forward(kind: str, arguments: dict, message: str) -> None:
    module = SparseMLAAttention(geometry(kind))
    given = {"x": STEP.x[:, 0], "metadata": metadata(), **arguments}
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        module(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_page_size": 0}, "swa_page_size"),
        ({"seq_lens": STEP.seq_lens.long()}, "seq_lens: expected"),
        ({"causal": False}, "width: expected"),
        ({"block_size": None}, "block_size: expected"),
    ],
)
def test_metadata(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metadata(**changes)
