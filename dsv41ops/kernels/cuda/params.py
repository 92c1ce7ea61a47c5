"""``Params``, the one parameter of the kernels here, field by field as ``common.cuh`` has it."""

from __future__ import annotations

import struct

# Names in C++ and codes of `struct`: P pointer, q and i 64 and 32 bits, I unsigned, f float.
POOL = {
    "bytes": "P",
    "indices": "P",
    "lens": "P",
    "page_stride": "q",
    "indices_stride": "q",
    "page_size": "I",
    "num_slots": "I",
    "page_magic": "I",
    "page_shift": "i",
    "width": "i",
    "unused": "i",
}
FIELDS = {
    "q": "P",
    "q_token_stride": "q",
    "q_head_stride": "q",
    **{f"swa.{name}": code for name, code in POOL.items()},
    **{f"topk.{name}": code for name, code in POOL.items()},
    "sink": "P",
    "out": "P",
    "out_token_stride": "q",
    "out_head_stride": "q",
    "lse": "P",
    "lse_token_stride": "q",
    "lse_head_stride": "q",
    "positions": "P",
    "cos_sin": "P",
    "cos_sin_stride": "q",
    "num_positions": "i",
    "wide_positions": "i",
    "num_heads": "i",
    "head_groups": "i",
    "scale_log2": "f",
    "num_units": "i",
}
LAYOUT = struct.Struct("@" + "".join(FIELDS.values()) + "0P")  # 0P: a struct ends aligned
