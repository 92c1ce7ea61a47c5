"""The metadata's fields, and the module's imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
import torch
from torch import Tensor

from dsv41ops.backend import SparseMLAMetadata

# SPEC section 6; the last three have defaults, the last two may be None.
FIELDS = {
    "num_reqs": MISSING,
    "max_query_len": MISSING,
    "max_seq_len": MISSING,
    "num_actual_tokens": MISSING,
    "query_start_loc": MISSING,
    "slot_mapping": MISSING,
    "block_table": MISSING,
    "req_id_per_token": MISSING,
    "block_size": MISSING,
    "topk_tokens": MISSING,
    "cp_kv_cache_interleave_size": 1,
    "seq_lens": None,
    "dcp_local_seq_lens": None,
}


def test_fields_names_order_and_defaults() -> None:
    assert {field.name: field.default for field in fields(SparseMLAMetadata)} == FIELDS
    assert [field.name for field in fields(SparseMLAMetadata)] == list(FIELDS)


def test_an_engine_may_fill_it_itself() -> None:
    tensors: dict[str, Tensor] = {
        name: torch.zeros(1)
        for name in ("query_start_loc", "slot_mapping", "block_table", "req_id_per_token")
    }
    metadata = SparseMLAMetadata(
        num_reqs=1,
        max_query_len=1,
        max_seq_len=1,
        num_actual_tokens=1,
        block_size=64,
        topk_tokens=512,
        **tensors,
    )
    assert metadata.seq_lens is None
    assert metadata.dcp_local_seq_lens is None
    with pytest.raises(TypeError, match="topk_tokens"):
        SparseMLAMetadata(1, 1, 1, 1, *tensors.values(), 64)  # type: ignore[call-arg, arg-type]


def test_imports() -> None:
    """The package does not load its backend, the backend loads neither triton nor the compiler."""
    script = """
import sys
import dsv41ops
assert "dsv41ops.backend" not in sys.modules
before = set(sys.modules)
import dsv41ops.backend
added = sorted(name for name in set(sys.modules) - before if not name.startswith("dsv41ops."))
heavy = [n for n in added if n.startswith(("triton", "torch._dynamo", "torch._inductor"))]
assert not heavy, heavy
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
