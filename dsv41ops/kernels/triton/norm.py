"""RMSNorm, with the reference's bits."""

import triton
import triton.language as tl


@triton.jit
def inverse_rms(values, eps, WIDTH: tl.constexpr):
    """Of one f32 row in a block of any shape. In float64 no order of the sum shows."""
    wide = values.to(tl.float64)
    mean = (tl.sum(wide * wide) / WIDTH).to(tl.float32)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
