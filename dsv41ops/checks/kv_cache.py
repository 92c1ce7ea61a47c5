"""Checks of KV-cache inserts and reads."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41ops.checks.common import (
    SLOT_DTYPES,
    check_at_least,
    check_cache,
    check_rope,
    check_size,
    check_tensor,
)
from dsv41ops.layouts import HEAD_DIM


def check_kv_cache_insert(kv: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    _check_rows(kv, (torch.bfloat16,), cache)
    _check_destination(slot_mapping, kv, cache)


def check_rope_kv_cache_insert(
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
) -> None:
    _check_rows(kv, (torch.bfloat16, torch.float32), cache)
    check_rope(positions, cos_sin, kv.shape[0], "rows of kv", cache.device)
    _check_destination(slot_mapping, kv, cache)
    check_at_least("compress_ratio", compress_ratio, 1)


def check_kv_cache_gather(cache: Tensor, slots: Tensor) -> None:
    check_cache("cache", cache, cache.device)
    check_tensor("slots", slots, SLOT_DTYPES, 1, cache.device)


def _check_rows(kv: Tensor, dtypes: tuple[torch.dtype, ...], cache: Tensor) -> None:
    check_tensor("kv", kv, dtypes, 2, cache.device)
    check_size("kv", kv, 1, HEAD_DIM, "head_dim")


def _check_destination(slot_mapping: Tensor, kv: Tensor, cache: Tensor) -> None:
    check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, 1, cache.device)
    check_size("slot_mapping", slot_mapping, 0, kv.shape[0], "rows of kv")
    check_cache("cache", cache, cache.device)
