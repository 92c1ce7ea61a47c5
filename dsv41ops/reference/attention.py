"""Sparse MLA over a window cache and a compressed cache, and the merge of partial results."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.reference.kv_cache import gather_rows
from dsv41ops.reference.rope import rotate_last

# Rows decoded to f32 at a time: 128 MiB.
ROWS_PER_CHUNK = 2**16


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    cache: Tensor | None,
    topk_indices: Tensor | None,
    topk_lens: Tensor | None,
    attn_sink: Tensor | None,
    softmax_scale: float,
    batch_invariant: bool,
    backend: str = "auto",
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty((num_tokens, num_heads, head_dim))
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    sources = [(swa_cache, swa_indices, swa_lens)]
    if cache is not None and topk_indices is not None and topk_lens is not None:
        sources.append((cache, topk_indices, topk_lens))
    width = sum(indices.shape[1] for _, indices, _ in sources)
    # A batched matmul may pick its kernel by batch size, and with it the order of a sum.
    chunk = 1 if batch_invariant else max(1, ROWS_PER_CHUNK // max(1, width))
    for start in range(0, num_tokens, chunk):
        part = slice(start, start + chunk)
        rows, visible = _selected_rows(
            [(pool, indices[part], lens[part]) for pool, indices, lens in sources]
        )
        attended, lse[part] = _attend(q[part], rows, visible, attn_sink, softmax_scale)
        if positions is not None and cos_sin is not None:
            attended = rotate_last(attended, positions[part], cos_sin, inverse=True)
        out[part] = attended.masked_fill(~visible.any(1)[:, None, None], 0)
    return out, lse


def _selected_rows(sources: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """``[t, N, 512]`` f32 rows, zero where not visible, and their ``[t, N]`` visibility."""
    rows, visible = [], []
    for cache, indices, lens in sources:
        column = torch.arange(indices.shape[1], device=indices.device)
        num_slots = cache.shape[0] * cache.shape[1]
        seen = (column < lens[:, None]) & (indices >= 0) & (indices < num_slots)
        slots = torch.where(seen, indices, -1)
        rows.append(gather_rows(cache, slots.flatten()).float().unflatten(0, slots.shape))
        visible.append(seen)
    return torch.cat(rows, 1), torch.cat(visible, 1)


def _attend(
    q: Tensor, rows: Tensor, visible: Tensor, attn_sink: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    scores = torch.bmm(q.float(), rows.transpose(1, 2)) * softmax_scale  # [t, H, N]
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = torch.logsumexp(scores, 2)
    empty = ~visible.any(1)[:, None]
    weights = torch.softmax(scores.masked_fill(empty[:, :, None], 0), 2)
    out = torch.bmm(weights, rows)
    if attn_sink is not None:
        out = out * _sink_factor(lse, attn_sink)[:, :, None]
    return out, lse


def _sink_factor(lse: Tensor, attn_sink: Tensor) -> Tensor:
    """``1 / (1 + exp(sink - lse))``, finite for any sink."""
    return torch.sigmoid(lse - attn_sink)


def merge_attention_states(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(lses, 0)
    empty = lse == -torch.inf
    # Not exp(lse_i - lse): of large numbers, the rounding of lse alone would show.
    weights = torch.softmax(lses.masked_fill(empty, 0), 0)
    # From -0.0, and -0.0 for a rank with nothing: x + -0.0 is x, bit for bit.
    out = torch.full(outs.shape[1:], -0.0, dtype=torch.float32, device=outs.device)
    for rank in range(outs.shape[0]):
        nothing = (lses[rank] == -torch.inf)[:, :, None]
        out = out + (outs[rank].float() * weights[rank][:, :, None]).masked_fill(nothing, -0.0)
    if attn_sink is not None:
        out = out * _sink_factor(lse, attn_sink)[:, :, None]
    return out.masked_fill(empty[:, :, None], 0).to(outs.dtype), lse
