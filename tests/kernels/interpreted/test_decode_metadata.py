"""The kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41ops.kernels.triton import decode_metadata as module
from dsv41ops.kernels.triton.decode_metadata import OUTPUTS, launch_decode_metadata
from dsv41ops.reference.index import decode_metadata
from tests.kernels.interpreted.batches import BATCHES, CPU, FAR, Batch, assert_padded, guarded
from tests.oracles import Shard
from tests.reference.test_large_strides import far_apart
from tests.support import assert_same_bits, ints

SHARDS = [Shard(), Shard(1, 0, 4), Shard(2, 1, 4), Shard(3, 0, 2)]
PRESENT = ["", "swa", "c1a", "c2a", "swa c1a c2a"]


def step(
    batch: Batch, present: str = "swa c1a c2a", shard: Shard = SHARDS[0], **options: Any
) -> tuple[Any, ...]:
    """Positional arguments of a step; interleaves of C1A and C2A differ."""
    table = {kind: batch.table() if kind in present else None for kind in ("swa", "c1a", "c2a")}
    given = {
        "window": 20,
        "width": None,
        "causal": True,
        "replay_start": None,
        "slot_mapping": None,
        **options,
    }
    return (
        *batch.geometry(), batch.num_tokens,
        table["swa"], 6, table["c1a"], table["c2a"], 16, *given.values(),
        shard.world, shard.rank, shard.interleave, shard.interleave // 2 or 1,
    )  # fmt: skip


def check(*arguments: Any) -> None:
    expected = decode_metadata(*arguments)
    for mine, reference in zip(launch_decode_metadata(*arguments), expected, strict=True):
        assert_same_bits(mine, reference)


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("batch", BATCHES)
def test_what_is_present(batch: Batch, present: str) -> None:
    for shard in SHARDS[:: 2 if present else 1]:
        check(*step(batch, present, shard))


@pytest.mark.parametrize(
    ("window", "width", "causal"),
    [(20, None, True), (1, None, True), (20, 33, True), (20, 64, False), (20, 3, False)],
)
@pytest.mark.parametrize("batch", BATCHES)
def test_windows_and_replay(batch: Batch, window: int, width: int | None, causal: bool) -> None:
    options = {
        "window": window,
        "width": width,
        "causal": causal,
        "replay_start": torch.randint(-3, 40, (len(batch.seq_lens),), dtype=torch.int32),
        "slot_mapping": torch.randint(
            -2, 3, (batch.num_tokens + 2,), dtype=torch.int32 if causal else torch.int64
        ),
    }
    check(*step(batch, shard=SHARDS[2], **options))


@pytest.mark.parametrize("num_requests", [127, 128, 129, 511, 512, 513, 1030])
def test_every_request_is_found(num_requests: int) -> None:
    """On both sides of each block of starts, with empty requests around the edges."""
    lengths = torch.randint(3, (num_requests,)) * (torch.rand(num_requests) < 0.1)
    starts = [0, *lengths.cumsum(0).tolist()]
    num_tokens = starts[-1] + 3
    seq_lens = (lengths + torch.randint(40, (num_requests,))).tolist()
    check(*step(Batch(tuple(starts), tuple(seq_lens), num_tokens), window=3))


def test_unordered_starts_read_nothing_outside() -> None:
    batch = Batch((5, -3, FAR, 0, -(2**31), 9, 9), (5, FAR, -(2**31), 7, 3, 2), 20)
    arguments = step(batch)
    metadata = dict(zip(OUTPUTS, launch_decode_metadata(*arguments), strict=True))
    request = metadata["req_id_per_token"]
    assert bool(((request >= -1) & (request < 6)).all())
    pages = arguments[3][arguments[3] >= 0]
    slots = metadata["swa_indices"]
    assert bool(((slots == -1) | torch.isin(slots // 6, pages)).all())


@pytest.mark.parametrize("width", [128, 129, 513, 1025])
def test_every_block_of_columns(width: int) -> None:
    batch = Batch((0, 2, 3), (width + 40, width // 2), 4)
    arguments = list(step(batch, window=width))
    arguments[3:5] = batch.table(width), 3
    check(*arguments)


@pytest.mark.parametrize("page_size", [1, 2**30, 2**31, 2**40])
def test_slots_past_int32(page_size: int) -> None:
    """Left out of the window's rows, whole as the slot of a state."""
    table = ints([[1, 3, 0], [0, 2**22, 2]], CPU)
    batch = ints([0, 3, 6], CPU), ints([5, FAR], CPU)
    sizes = (table, page_size, table, table, 2 * page_size)
    check(*batch, 6, *sizes, 5, None, True, None, None, 1, 0, 1, 1)


def buffers(arguments: tuple[Any, ...], extra: int) -> dict[str, Tensor]:
    """Buffers of sevens with guards around them, ``extra`` rows longer than the results."""
    made = {}
    for name, result in zip(OUTPUTS, decode_metadata(*arguments), strict=True):
        width = result.shape[1] if result.dim() == 2 else None
        made[name] = guarded(result.shape[0] + extra, width, result.dtype)
    return made


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("extra", [0, 1, 150])
def test_out(extra: int, present: str) -> None:
    batch = Batch((0, 4, 50), (9, 90), 7)  # tokens past num_tokens are padding, though owned
    arguments = step(batch, present, SHARDS[2])
    given = buffers(arguments, extra)
    launch_decode_metadata(*arguments, **given)
    for (name, buffer), expected in zip(given.items(), decode_metadata(*arguments), strict=True):
        assert_padded(buffer, expected, 0 if "lens" in name else -1)


@pytest.mark.parametrize("kept", OUTPUTS)
def test_one_output_alone(kept: str) -> None:
    """The others' buffers are empty, and nothing lies behind them to be written."""
    batch = BATCHES[1].values[0]
    arguments = step(batch)
    given = buffers(arguments, 20)
    rows = "swa_indices", "swa_lens"
    for name, buffer in given.items():
        if name != kept and not (kept in rows and name in rows):
            given[name] = guarded(0, buffer.shape[1] if buffer.dim() == 2 else None, buffer.dtype)
    launch_decode_metadata(*arguments, **given)
    for (name, buffer), expected in zip(given.items(), decode_metadata(*arguments), strict=True):
        assert_padded(buffer, expected[: len(buffer)], 0 if "lens" in name else -1)


def test_far_rows() -> None:
    batch = Batch((0, 1, 2, 3), (40, 33, 8), 3)
    arguments = list(step(batch))
    expected = decode_metadata(*arguments)
    for place in (3, 5, 6):
        arguments[place] = far_apart(arguments[place].contiguous(), 2**30 + 4)
    given = buffers(step(batch), 0)
    given["swa_indices"] = far_apart(torch.full((3, 20), 7, dtype=torch.int32), 2**30 + 4)
    launch_decode_metadata(*arguments, **given)
    for buffer, result in zip(given.values(), expected, strict=True):
        assert_same_bits(buffer, result)


def test_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: grids.append(grid)

    monkeypatch.setattr(module, "_decode_metadata_kernel", Counted())
    launch_decode_metadata(*step(Batch((0, 8, 9, 12), (40, 1, 90), 12)))
    launch_decode_metadata(*step(Batch((0, 0), (0,), 0), present=""))
    assert grids == [(12 + 3 + 1,)]
