"""While a CUDA graph is captured nothing may be compiled or loaded: an error says so first."""

from __future__ import annotations

import torch


def refuse_in_capture(lack: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{lack}, and a CUDA graph is being captured. Call dsv41ops.warmup for this "
            "configuration, or the op once, before capturing."
        )
