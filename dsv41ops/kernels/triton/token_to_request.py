"""Request of each token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41ops.kernels.triton.common import TOKEN_BLOCK, find_requests, kernel


@kernel
def _token_to_request_kernel(
    query_start_loc_ptr, num_requests, num_tokens, out_ptr, BLOCK: tl.constexpr
):
    """One program per BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = find_requests(query_start_loc_ptr, num_requests, token, num_tokens)
    tl.store(out_ptr + token, request, mask=token < num_tokens)


def launch_token_to_request(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    out = query_start_loc.new_empty((num_tokens,), dtype=torch.int32)
    if num_tokens > 0:
        _token_to_request_kernel[(triton.cdiv(num_tokens, TOKEN_BLOCK),)](
            query_start_loc,
            query_start_loc.shape[0] - 1,
            num_tokens,
            out,
            BLOCK=TOKEN_BLOCK,
            num_warps=1,
        )
    return out
