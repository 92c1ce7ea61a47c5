"""States of each request that this rank owns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import kernel, stripe_of

BLOCK = 128


@triton.jit
def owned_states(seq_len, compress_ratio, stripe, first_owned, interleave):
    """int32 number of a rank's states; ``first_owned`` is the first of its first run."""
    states = tl.maximum(seq_len, 0) // compress_ratio
    rest = tl.minimum(tl.maximum(states % stripe - first_owned, 0), interleave)
    return (states // stripe * interleave + rest).to(tl.int32)


@kernel
def _dcp_local_seq_lens_kernel(
    seq_lens_ptr,
    num_requests,
    compress_ratio,
    stripe,
    first_owned,
    interleave,
    out_ptr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK requests."""
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = request < num_requests
    seq_len = tl.load(seq_lens_ptr + request, mask=real, other=0)
    owned = owned_states(seq_len, compress_ratio, stripe, first_owned, interleave)
    tl.store(out_ptr + request, owned, mask=real)


def launch_dcp_local_seq_lens(
    seq_lens: Tensor, compress_ratio: int, dcp_world_size: int, dcp_rank: int, cp_interleave: int
) -> Tensor:
    num_requests = seq_lens.shape[0]
    out = seq_lens.new_empty((num_requests,), dtype=torch.int32)
    if num_requests > 0:
        _dcp_local_seq_lens_kernel[(triton.cdiv(num_requests, BLOCK),)](
            seq_lens,
            num_requests,
            compress_ratio,
            stripe_of(dcp_world_size, cp_interleave),
            stripe_of(dcp_rank, cp_interleave),
            cp_interleave,
            out,
            BLOCK=BLOCK,
        )
    return out
