"""What checks of several ops share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv41ops.layouts import HEAD_DIM, RECORDS, ROPE_DIM, find_record

INT32 = (torch.int32,)
SLOT_DTYPES = (torch.int32, torch.int64)


def expect(condition: bool | torch.SymBool, name: str, describe: Callable[[], str]) -> None:
    """``describe`` says "<accepted>, got <what came>"; it runs only when it is needed."""
    if condition is not True:
        torch._check_value(condition, lambda: f"{name}: expected {describe()}")


def shape_of(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def check_tensor(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], ndim: int, device: torch.device
) -> None:
    """Dtype, rank, device, and a last dimension that lies densely."""
    expect(
        tensor.dtype in dtypes,
        name,
        lambda: f"{' or '.join(map(str, dtypes))}, got {tensor.dtype}",
    )
    expect(tensor.dim() == ndim, name, lambda: f"{ndim} dimensions, got {shape_of(tensor)}")
    _check_device(name, tensor, device)
    _check_dense(name, tensor)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    came = tensor.device
    expect(came == device, name, lambda: f"a tensor on {device}, got {came}")


def expect_stride(
    name: str,
    holds: bool | torch.SymBool,
    size: int | torch.SymInt,
    accepted: Callable[[], str],
    tensor: Tensor,
) -> None:
    # The stride of a dimension of one element is never used, so it may be anything.
    condition = size <= 1 if holds is False else holds
    expect(
        condition, name, lambda: f"{accepted()}, got {shape_of(tensor)}, stride {tensor.stride()}"
    )


def _check_dense(name: str, tensor: Tensor) -> None:
    holds = tensor.stride(-1) == 1
    expect_stride(name, holds, tensor.shape[-1], lambda: "stride 1 in the last dimension", tensor)


def check_size(name: str, tensor: Tensor, dim: int, size: int | torch.SymInt, what: str) -> None:
    expect(
        tensor.shape[dim] == size,
        name,
        lambda: f"{what} = {size} in dimension {dim}, got {shape_of(tensor)}",
    )


def check_at_least(name: str, value: int | torch.SymInt, bound: int) -> None:
    expect(value >= bound, name, lambda: f"at least {bound}, got {value}")


def check_holds(name: str, tensor: Tensor, num_tokens: int | torch.SymInt) -> None:
    """A per-token buffer may be longer than this step's tokens, not shorter."""
    holds = tensor.shape[0] >= num_tokens
    expect(holds, name, lambda: f"at least {num_tokens} rows, got {shape_of(tensor)}")


def check_batch(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    device = query_start_loc.device
    check_tensor("query_start_loc", query_start_loc, INT32, 1, device)
    check_at_least("query_start_loc's length", query_start_loc.shape[0], 1)
    check_tensor("seq_lens", seq_lens, INT32, 1, device)
    check_size("seq_lens", seq_lens, 0, query_start_loc.shape[0] - 1, "len(query_start_loc) - 1")


def check_states(
    states_per_page: int, compress_ratio: int, world: int, rank: int, interleave: int
) -> None:
    check_at_least("states_per_page", states_per_page, 1)
    check_at_least("compress_ratio", compress_ratio, 1)
    check_dcp(world, rank, interleave)
    check_whole_blocks("states_per_page", states_per_page, world, interleave)


def check_whole_blocks(
    name: str, states: int, world: int, interleave: int, form: str = "{}"
) -> None:
    """Under DCP; ``form`` is what is said of the number that is accepted."""
    if world > 1:
        # A page would otherwise hold states of a block that is not allocated yet.
        expect(
            states % interleave == 0,
            name,
            lambda: (
                form.format(f"a multiple of cp_interleave = {interleave}")
                + f" under DCP, got {states}"
            ),
        )


def check_dcp(
    world: int, rank: int, interleave: int, interleave_name: str = "cp_interleave"
) -> None:
    check_at_least("dcp_world_size", world, 1)
    expect(
        0 <= rank < world,
        "dcp_rank",
        lambda: f"0 <= rank < dcp_world_size = {world}, got {rank}",
    )
    check_at_least(interleave_name, interleave, 1)


def check_cache(name: str, cache: Tensor, device: torch.device) -> None:
    expect(cache.dim() == 3, name, lambda: f"3 dimensions, got {shape_of(cache)}")
    _check_device(name, cache, device)
    width = int(cache.shape[2])
    expect(
        find_record(cache.dtype, width) is not None,
        name,
        lambda: f"a last dimension of {_accepted_records()}, got {width} {cache.dtype}",
    )
    _check_dense(name, cache)
    check_pages(name, cache, width)


def check_pages(name: str, cache: Tensor, width: int) -> None:
    """Rows that adjoin, in pages that do not overlap."""
    pages, page_size, _ = cache.shape
    check_at_least(f"{name}'s page size", page_size, 1)
    rows_adjoin = cache.stride(1) == width
    expect_stride(name, rows_adjoin, page_size, lambda: f"rows {width} elements apart", cache)
    page = page_size * width
    pages_apart = cache.stride(0) >= page
    expect_stride(name, pages_apart, pages, lambda: f"pages at least {page} elements apart", cache)


def _accepted_records() -> str:
    accepted = [f"{record.row_bytes} torch.uint8 ({record.name})" for record in RECORDS]
    return ", ".join([*accepted, f"{HEAD_DIM} torch.bfloat16 (bf16)"])


def check_rope(
    positions: Tensor,
    cos_sin: Tensor,
    num_tokens: int | torch.SymInt,
    what: str,
    device: torch.device,
) -> None:
    check_tensor("positions", positions, SLOT_DTYPES, 1, device)
    check_size("positions", positions, 0, num_tokens, what)
    check_tensor("cos_sin", cos_sin, (torch.float32,), 2, device)
    check_size("cos_sin", cos_sin, 1, ROPE_DIM, "cosines and sines")
