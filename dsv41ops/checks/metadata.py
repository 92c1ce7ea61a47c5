"""Checks of decode_metadata."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.checks.common import (
    INT32,
    SLOT_DTYPES,
    check_at_least,
    check_batch,
    check_dcp,
    check_holds,
    check_size,
    check_tensor,
    expect,
    shape_of,
)
from dsv41ops.checks.index import check_replay_start, check_window


def check_decode_metadata(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor | None,
    swa_page_size: int | None,
    block_table_c1a: Tensor | None,
    block_table_c2a: Tensor | None,
    block_size: int | None,
    window: int,
    width: int | None,
    causal: bool,
    replay_start: Tensor | None,
    slot_mapping: Tensor | None,
    dcp_world_size: int,
    dcp_rank: int,
    cp_interleave_c1a: int,
    cp_interleave_c2a: int,
) -> None:
    check_batch(query_start_loc, seq_lens)
    device = query_start_loc.device
    check_at_least("num_tokens", num_tokens, 0)
    if swa_block_table is not None:
        check_tensor("swa_block_table", swa_block_table, INT32, 2, device)
        _check_given_with("swa_page_size", swa_page_size, "swa_block_table")
    check_window(window, width, causal)
    check_replay_start(replay_start, seq_lens)
    if slot_mapping is not None:
        check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, device)
        check_holds("slot_mapping", slot_mapping, num_tokens)
    for kind, ratio, table, interleave in (
        ("c1a", 1, block_table_c1a, cp_interleave_c1a),
        ("c2a", 2, block_table_c2a, cp_interleave_c2a),
    ):
        check_dcp(dcp_world_size, dcp_rank, interleave, f"cp_interleave_{kind}")
        if table is not None:
            check_tensor(f"block_table_{kind}", table, INT32, 2, device)
            size = _check_given_with("block_size", block_size, f"block_table_{kind}")
            # Whole states, and under DCP whole runs of them: see check_states.
            _check_multiple("block_size", size, ratio * (interleave if dcp_world_size > 1 else 1))


def _check_multiple(name: str, value: int, step: int) -> None:
    expect(value % step == 0, name, lambda: f"a multiple of {step} tokens, got {value}")


def _check_given_with(name: str, value: int | None, owner: str) -> int:
    holds = value is not None and value >= 1
    expect(holds, name, lambda: f"at least 1 with {owner}, got {value}")
    return 1 if value is None else value


def check_decode_metadata_out(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    swa_block_table: Tensor | None,
    swa_page_size: int | None,
    block_table_c1a: Tensor | None,
    block_table_c2a: Tensor | None,
    block_size: int | None,
    window: int,
    width: int | None,
    *options: object,
    swa_indices: Tensor,
    swa_lens: Tensor,
    **buffers: Tensor,
) -> None:
    check_decode_metadata(
        query_start_loc,
        seq_lens,
        num_tokens,
        swa_block_table,
        swa_page_size,
        block_table_c1a,
        block_table_c2a,
        block_size,
        window,
        width,
        *options,  # type: ignore[arg-type]
    )
    device = query_start_loc.device
    present = {"swa": swa_block_table, "c1a": block_table_c1a, "c2a": block_table_c2a}
    for name, buffer in buffers.items():
        owner = next((kind for kind in present if kind in name), None)
        absent = owner is not None and present[owner] is None
        lengths = name.startswith("dcp_local_seq_lens")
        num_rows = 0 if absent else seq_lens.shape[0] if lengths else num_tokens
        wide = name == "positions" or "slot_mapping" in name
        check_tensor(name, buffer, (torch.int64,) if wide else INT32, 1, device)
        _check_wanted(name, buffer, num_rows)
    check_tensor("swa_indices", swa_indices, INT32, 2, device)
    _check_wanted("swa_indices", swa_indices, 0 if swa_block_table is None else num_tokens)
    check_size("swa_indices", swa_indices, 1, window if width is None else width, "index width")
    check_tensor("swa_lens", swa_lens, INT32, 1, device)
    check_size("swa_lens", swa_lens, 0, swa_indices.shape[0], "rows of swa_indices")


def _check_wanted(name: str, buffer: Tensor, num_rows: int) -> None:
    """An empty buffer is one that the caller does without."""
    size = buffer.shape[0]
    holds = (size >= num_rows) | (size == 0)
    expect(holds, name, lambda: f"at least {num_rows} rows or none, got {shape_of(buffer)}")
