"""Rotate latent rows and encode them into a paged cache: the kernel of ``kv_cache_insert``."""

from torch import Tensor

from dsv41ops.kernels.triton.kv_cache_insert import insert_rows


def launch_rope_kv_cache_insert(
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    compress_ratio: int,
) -> None:
    insert_rows(kv, slot_mapping, cache, positions, cos_sin, compress_ratio)
