"""No kernel is compiled while a CUDA graph is captured: an error says so before the driver does."""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs


def _refuse_in_capture(previous: Any) -> Any:
    def hook(*, fn: Any, **details: Any) -> Any:
        if fn.module.startswith("dsv41ops.") and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{fn.name}: not compiled yet, and a CUDA graph is being captured. Call "
                "dsv41ops.warmup for this configuration, or the op once, before capturing."
            )
        return previous(fn=fn, **details) if previous is not None else None

    return hook


def guard_capture() -> None:
    """Have Triton ask before it compiles; a hook that is already there still runs."""
    knobs.runtime.jit_cache_hook = _refuse_in_capture(knobs.runtime.jit_cache_hook)
