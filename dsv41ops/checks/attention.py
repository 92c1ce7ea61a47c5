"""Checks of sparse MLA and of merging its results."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.checks.common import (
    INT32,
    check_at_least,
    check_cache,
    check_holds,
    check_rope,
    check_size,
    check_tensor,
    expect,
    shape_of,
)
from dsv41ops.configs import AUTO, BACKENDS
from dsv41ops.layouts import HEAD_DIM

MAX_HEADS = 128


def check_sparse_mla_decode(
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
    backend: str,
    positions: Tensor | None,
    cos_sin: Tensor | None,
) -> None:
    check_tensor("q", q, (torch.bfloat16,), 3, q.device)
    num_tokens, num_heads, _ = q.shape
    check_size("q", q, 2, HEAD_DIM, "head_dim")
    check_at_least("q's number of heads", num_heads, 1)
    expect(num_heads <= MAX_HEADS, "q", lambda: f"1 to {MAX_HEADS} heads, got {shape_of(q)}")
    check_cache("swa_cache", swa_cache, q.device)
    _check_rows("swa_indices", swa_indices, "swa_lens", swa_lens, num_tokens, q.device)
    if cache is not None and topk_indices is not None and topk_lens is not None:
        check_cache("cache", cache, q.device)
        _check_rows("topk_indices", topk_indices, "topk_lens", topk_lens, num_tokens, q.device)
    else:
        given = {"cache": cache, "topk_indices": topk_indices, "topk_lens": topk_lens}
        missing = [name for name, tensor in given.items() if tensor is None]
        expect(
            len(missing) == len(given),
            " and ".join(missing),
            lambda: "cache, topk_indices and topk_lens together, or none of them, got None",
        )
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), 1, q.device)
        check_size("attn_sink", attn_sink, 0, num_heads, "heads")
    if positions is not None and cos_sin is not None:
        check_rope(positions, cos_sin, num_tokens, "tokens", q.device)
    else:
        expect(
            positions is cos_sin,
            "positions" if positions is None else "cos_sin",
            lambda: "positions and cos_sin together, or neither, got None",
        )
    if backend != AUTO:
        check_backend("backend", backend)
        expect(
            q.device.type != "cpu",
            "backend",
            lambda: f"{AUTO} on a CPU, got {backend!r}, which needs a CUDA device",
        )


def check_backend(name: str, backend: str) -> None:
    accepted = (AUTO, *BACKENDS)
    expect(backend in accepted, name, lambda: f"one of {', '.join(accepted)}, got {backend!r}")


def _check_rows(
    name: str, indices: Tensor, lens_name: str, lens: Tensor, num_tokens: int, device: torch.device
) -> None:
    check_tensor(name, indices, INT32, 2, device)
    check_size(name, indices, 0, num_tokens, "tokens")
    check_tensor(lens_name, lens, INT32, 1, device)
    check_size(lens_name, lens, 0, num_tokens, "tokens")


def check_sparse_mla_decode_out(q: Tensor, *options: object, out: Tensor, lse: Tensor) -> None:
    check_sparse_mla_decode(q, *options)  # type: ignore[arg-type]
    num_tokens, num_heads, _ = q.shape
    check_tensor("out", out, (torch.bfloat16,), 3, q.device)
    check_holds("out", out, num_tokens)
    check_size("out", out, 1, num_heads, "heads")
    check_size("out", out, 2, HEAD_DIM, "head_dim")
    check_tensor("lse", lse, (torch.float32,), 2, q.device)
    check_holds("lse", lse, num_tokens)
    check_size("lse", lse, 1, num_heads, "heads")


def check_merge_attention_states(outs: Tensor, lses: Tensor, attn_sink: Tensor | None) -> None:
    check_tensor("outs", outs, (torch.bfloat16, torch.float32), 4, outs.device)
    check_size("outs", outs, 3, HEAD_DIM, "head_dim")
    check_tensor("lses", lses, (torch.float32,), 3, outs.device)
    for dim, what in enumerate(("ranks", "tokens", "heads")):
        check_size("lses", lses, dim, outs.shape[dim], what)
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, (torch.float32,), 1, outs.device)
        check_size("attn_sink", attn_sink, 0, outs.shape[2], "heads")
