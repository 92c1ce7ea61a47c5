"""RMSNorm that has the same bits on every device."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``[N, D]`` f32: mean, root and reciprocal each rounded to f32 once.

    They are computed in float64, where no order of a sum shows, nor that the CPU's f32 root is not
    always the nearest one.
    """
    mean = x.double().square().mean(1, keepdim=True).float()
    root = (mean + eps).double().sqrt().float()
    return x * root.double().reciprocal().float() * weight.float()
