"""What FlashMLA's Hopper kernels can serve behind ``sparse_mla_decode``."""

from __future__ import annotations

from dsv41ops.configs import DecodeProblem
from dsv41ops.kernels.flash_mla.library import unavailable
from dsv41ops.layouts import FP8_DS_MLA

__all__ = ["supports", "unavailable"]


def supports(problem: DecodeProblem) -> str | None:
    name = FP8_DS_MLA.name
    if {problem.window_record, problem.record or name} != {name}:
        return f"has kernels for {name} in both caches only, these are {problem.records}"
    if problem.batch_invariant:
        return "batch_invariant: how it splits a row follows the batch"
    if problem.rope:
        return "positions and cos_sin: it does not rotate its output"
    if not problem.softmax_scale > 0:
        return "softmax_scale: its mask needs one above 0"
    if problem.empty_pool:
        return "a cache without a page: it reads page 0 for an index of -1"
    if not problem.aligned:
        return "caches have to begin at, and pages to step by, multiples of 16 bytes"
    if problem.page_stride >= 2**31:
        return f"pages may be up to 2^31 - 1 bytes apart, these are {problem.page_stride}"
    return None
