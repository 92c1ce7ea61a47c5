"""Request of each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import find_request, kernel, search_steps

BLOCK = 128


@kernel
def _token_to_request_kernel(
    query_start_loc_ptr, num_requests, steps, num_tokens, out_ptr, BLOCK: tl.constexpr
):
    """One program per BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < num_tokens
    request = find_request(query_start_loc_ptr, num_requests, steps, token, real)
    tl.store(out_ptr + token, request, mask=real)


def launch_token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    out = query_start_loc.new_empty((num_tokens,), dtype=torch.int32)
    if num_tokens > 0:
        _token_to_request_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            query_start_loc,
            query_start_loc.shape[0] - 1,
            search_steps(query_start_loc),
            num_tokens,
            out,
            BLOCK=BLOCK,
        )
    return out
