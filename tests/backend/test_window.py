"""The window builder: layer types, plans, causal and draft forms, and what the plans compute."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from dsv41ops.backend import (
    CommonAttentionMetadata,
    DCPGeometry,
    LayerType,
    SlidingWindowMetadataBuilder,
    draft_window_width,
)
from tests import oracles
from tests.backend.batches import BATCHES, ints, make_batch, tensors_of, whole_storage

SWA, C1A, C2A = LayerType.SWA, LayerType.C1A, LayerType.C2A
CAPACITY = 40
PAGE = 8
WINDOW = 24
RATIOS = [0, 0, 2, 2, 1, 1, 0]


def make_builder(**options: Any) -> SlidingWindowMetadataBuilder:
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": CAPACITY,
        "compress_ratios": RATIOS,
        "block_size": 64,
        "index_topk": 48,
        "page_size": PAGE,
        "window": WINDOW,
        "num_speculative_tokens": 4,
    }
    return SlidingWindowMetadataBuilder(**{**defaults, **options})


def expected(batch: CommonAttentionMetadata, width: int) -> tuple[list[list[int]], list[int]]:
    return oracles.sliding_window_indices(
        batch.query_start_loc.tolist(),
        batch.seq_lens.tolist(),
        batch.block_table_tensor.tolist(),
        len(batch.slot_mapping),
        PAGE,
        WINDOW,
        width,
        batch.causal,
        None if batch.replay_start is None else batch.replay_start.tolist(),
    )


@pytest.fixture(params=BATCHES)
def batch(request: pytest.FixtureRequest, device: torch.device) -> CommonAttentionMetadata:
    query_lens, seq_lens, padding = BATCHES[request.param]
    return make_batch(query_lens, seq_lens, padding=padding, device=device)


def test_every_field(batch: CommonAttentionMetadata, device: torch.device) -> None:
    metadata = make_builder(device=device).build(batch)
    taken = {"seq_lens", "query_start_loc", "slot_mapping"}
    for name in {"num_reqs", "max_query_len", "max_seq_len", "num_actual_tokens", "causal"} | taken:
        assert getattr(metadata, name) is getattr(batch, name)
    assert metadata.block_table is batch.block_table_tensor
    assert metadata.block_size == PAGE
    assert list(metadata.plans) == [SWA, C1A, C2A]
    checked = {*taken, "num_reqs", "max_query_len", "max_seq_len", "num_actual_tokens", "causal"}
    assert {field.name for field in fields(metadata)} == checked | {
        "block_table",
        "block_size",
        "plans",
    }


def test_causal_plans(batch: CommonAttentionMetadata, device: torch.device) -> None:
    metadata = make_builder(device=device).build(batch)
    indices, lens = expected(batch, WINDOW)
    geometry = {SWA: (None, 0), C1A: (64, 48), C2A: (32, 48)}
    for kind, plan in metadata.plans.items():
        assert plan.layer_type is kind
        assert (plan.states_per_page, plan.topk_tokens) == geometry[kind]
        assert plan.swa_indices.dtype == plan.swa_lens.dtype == torch.int32
        assert plan.swa_indices.tolist() == indices
        assert plan.swa_lens.tolist() == lens


def test_release_defaults(device: torch.device) -> None:
    """Pages of 32 rows, 128 tokens, 192 columns for drafts of up to 64 tokens."""
    builder = make_builder(page_size=32, window=128, device=device)
    default = SlidingWindowMetadataBuilder(
        max_num_batched_tokens=CAPACITY, num_speculative_tokens=4, device=device
    )
    batch = make_batch([1, 3], [300, 140], device=device)
    for causal, width in [(True, 128), (False, 192)]:
        plans = [b.build(replace(batch, causal=causal)).plan(0) for b in (builder, default)]
        assert plans[0].swa_indices.shape == (4, width)
        assert torch.equal(plans[0].swa_indices, plans[1].swa_indices)
        assert torch.equal(plans[0].swa_lens, plans[1].swa_lens)


@pytest.mark.parametrize(
    ("ratios", "used"),
    [
        (None, [SWA]),
        ([], [SWA]),
        ([0, 0], [SWA]),
        ([2, 2], [C2A]),
        ([0, 1], [SWA, C1A]),
        ([2, 1], [C1A, C2A]),
        ([0, 0] + [2] * 18 + [1] * 20 + [0] * 3, [SWA, C1A, C2A]),
    ],
)
def test_a_plan_for_each_type_present(ratios: list[int] | None, used: list[LayerType]) -> None:
    builder = make_builder(compress_ratios=ratios)
    assert list(builder.layer_types) == used
    metadata = builder.build(make_batch([1], [9]))
    assert list(metadata.plans) == used
    for kind in LayerType:
        if kind in used:
            assert metadata.plan(kind.compress_ratio) is metadata.plans[kind]
        else:
            present = ", ".join(str(present.compress_ratio) for present in used)
            message = rf"one of the model's \({present}\), got {kind.compress_ratio}"
            with pytest.raises(ValueError, match=f"compress_ratio: expected {message}"):
                metadata.plan(kind.compress_ratio)
    with pytest.raises(ValueError, match="compress_ratio: expected 0, 1 or 2, got 4"):
        metadata.plan(4)


def test_window_only_models_need_no_compressed_geometry() -> None:
    make_builder(compress_ratios=[0], block_size=None, index_topk=None)


@pytest.mark.parametrize("query_lens", [[5, 5], [1, 3, 0, 5], [0], []])
@pytest.mark.parametrize("padding", [0, 3])
def test_draft_plans(query_lens: list[int], padding: int, device: torch.device) -> None:
    """A draft block: the window before it and the whole of it, for each of its tokens."""
    seq_lens = [length + 20 * (request + 1) for request, length in enumerate(query_lens)]
    batch = make_batch(query_lens, seq_lens, padding=padding, causal=False, device=device)
    metadata = make_builder(device=device).build(batch)
    assert metadata.causal is False
    indices, lens = expected(batch, 64)
    for plan in metadata.plans.values():
        assert plan.swa_indices.tolist() == indices
        assert plan.swa_lens.tolist() == lens


def test_longest_draft_block_fits(device: torch.device) -> None:
    """The widest visible row, window plus block, loses nothing to the rounded width."""
    for drafts in (1, 39, 40):
        builder = make_builder(
            num_speculative_tokens=drafts, max_num_batched_tokens=64, device=device
        )
        batch = make_batch([drafts + 1], [90], causal=False, device=device)
        plan = builder.build(batch).plan(0)
        assert set(plan.swa_lens.tolist()) == {WINDOW + drafts + 1}


@pytest.mark.parametrize(
    ("window", "block", "width"),
    [(128, 1, 192), (128, 6, 192), (128, 64, 192), (128, 65, 256), (24, 5, 64), (64, 64, 128)],
)
def test_draft_width(window: int, block: int, width: int) -> None:
    assert draft_window_width(window, block) == width


def test_replay_start(device: torch.device) -> None:
    """Rows before it are not cached: causal windows start there, draft blocks ignore it."""
    start = ints([30, 0]).to(device)
    batch = make_batch([3, 2], [40, 9], replay_start=start, device=device)
    plan = make_builder(device=device).build(batch).plan(0)
    indices, lens = expected(batch, WINDOW)
    assert plan.swa_indices.tolist() == indices
    assert plan.swa_lens.tolist() == lens == [8, 9, 10, 8, 9]
    drafts = replace(batch, causal=False)
    plan = make_builder(device=device).build(drafts).plan(0)
    assert plan.swa_lens.tolist() == [27] * 3 + [9] * 2


def test_whole_buffers_are_filled(device: torch.device) -> None:
    builder = make_builder(device=device)
    for causal, name in [(True, "swa"), (False, "draft_swa")]:
        builder.build(make_batch([5] * 8, [60] * 8, causal=causal, device=device))
        builder.build(make_batch([2], [9], padding=1, causal=causal, device=device))
        indices, lens = (getattr(builder, f"{name}_{what}_buffer") for what in ("indices", "lens"))
        assert (indices[:2, 0] >= 0).all()
        assert (indices[2:] == -1).all()
        assert lens.tolist() == [8 if causal else 9, 9] + [0] * (CAPACITY - 2)


def test_buffers_are_allocated_once(device: torch.device) -> None:
    builder = make_builder(device=device, dcp=DCPGeometry(2, 1))
    buffers = {
        name: value for name, value in vars(builder).items() if isinstance(value, torch.Tensor)
    }
    assert {name: tuple(buffer.shape) for name, buffer in buffers.items()} == {
        "swa_indices_buffer": (CAPACITY, WINDOW),
        "swa_lens_buffer": (CAPACITY,),
        "draft_swa_indices_buffer": (CAPACITY, 64),
        "draft_swa_lens_buffer": (CAPACITY,),
        "_no_lens": (CAPACITY,),
    }
    addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    for query_lens, seq_lens, padding in BATCHES.values():
        for causal in (True, False):
            if not causal and max(query_lens, default=0) > 5:
                continue
            batch = make_batch(query_lens, seq_lens, padding=padding, causal=causal, device=device)
            plans = builder.build(batch).plans
            prefix = "swa" if causal else "draft_swa"
            for name in buffers:
                assert getattr(builder, name) is buffers[name]
                assert buffers[name].data_ptr() == addresses[name]
            if plans[SWA].swa_lens.numel():
                for kind, plan in plans.items():
                    lens = f"{prefix}_lens_buffer" if kind is SWA else "_no_lens"
                    assert plan.swa_indices.data_ptr() == addresses[f"{prefix}_indices_buffer"]
                    assert plan.swa_lens.data_ptr() == addresses[lens]


def test_forms_do_not_disturb_each_other(device: torch.device) -> None:
    """A draft step between two target steps leaves the target's plan alone."""
    builder = make_builder(device=device)
    plan = builder.build(make_batch([5], [60], device=device)).plan(0)
    kept = plan.swa_indices.clone(), plan.swa_lens.clone()
    builder.build(make_batch([4], [30], causal=False, device=device))
    assert torch.equal(plan.swa_indices, kept[0])
    assert torch.equal(plan.swa_lens, kept[1])


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_of_the_callers_is_written(causal: bool, device: torch.device) -> None:
    batch = make_batch(
        [1, 5],
        [40, 21],
        padding=2,
        causal=causal,
        device=device,
        replay_start=ints([3, 0]).to(device),
    )
    batch.block_table_tensor[:, -1] = -1
    tensors = tensors_of(batch)
    before = {name: (whole_storage(tensor), tensor._version) for name, tensor in tensors.items()}
    make_builder(device=device).build(batch)
    for name, tensor in tensors.items():
        assert getattr(batch, name) is tensor
        assert torch.equal(whole_storage(tensor), before[name][0]), name
        assert tensor._version == before[name][1], name


@pytest.mark.parametrize("causal", [True, False])
def test_window_counts_once_under_dcp(causal: bool, device: torch.device) -> None:
    """Rank 0 has the window in the plans of compressed layers; every rank has it in the others."""
    batch = make_batch([1, 5], [40, 21], padding=2, causal=causal, device=device)
    alone = make_builder(device=device).build(batch)
    for rank in range(3):
        builder = make_builder(device=device, dcp=DCPGeometry(3, rank))
        for kind, plan in builder.build(batch).plans.items():
            single = alone.plans[kind]
            assert torch.equal(plan.swa_indices, single.swa_indices)
            if kind is SWA or rank == 0:
                assert torch.equal(plan.swa_lens, single.swa_lens)
                assert plan.swa_lens.sum() > 0
            else:
                assert plan.swa_lens.tolist() == [0] * 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compress_ratios": [0, 3]}, ValueError, "compress_ratio: expected 0, 1 or 2, got 3"),
        ({"block_size": None}, TypeError, "block_size: expected an int, got NoneType"),
        ({"index_topk": None}, TypeError, "index_topk: expected an int, got NoneType"),
        ({"block_size": 63}, ValueError, "block_size: expected a multiple of compress_ratio = 2"),
        ({"index_topk": 0}, ValueError, "index_topk: expected at least 1, got 0"),
        ({"page_size": 0}, ValueError, "page_size: expected at least 1, got 0"),
        ({"window": 0}, ValueError, "window: expected at least 1, got 0"),
        ({"window": 24.0}, TypeError, "window: expected an int, got float"),
        ({"max_num_batched_tokens": 0}, ValueError, "max_num_batched_tokens: expected at least 1"),
        ({"num_speculative_tokens": -1}, ValueError, "num_speculative_tokens: expected at least 0"),
        (
            {"dcp": DCPGeometry(2, 0, 64)},
            ValueError,
            "states_per_page: expected a multiple of cp_interleave = 64 under DCP, got 32",
        ),
    ],
)
def test_argument_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_builder(**options)


def test_draft_blocks_need_speculative_tokens() -> None:
    builder = make_builder(num_speculative_tokens=0)
    assert builder.draft_swa_indices_buffer is None
    message = "causal: expected True without speculative tokens, got False"
    with pytest.raises(ValueError, match=message):
        builder.build(make_batch([1], [9], causal=False))


def test_draft_blocks_are_decodes() -> None:
    message = r"max_query_len: expected at most 1 \+ num_speculative_tokens = 5 .*, got 6"
    with pytest.raises(ValueError, match=message):
        make_builder().build(make_batch([1, 6], [9, 9], causal=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"slot_mapping": torch.zeros(CAPACITY + 1, dtype=torch.int64)},
            f"slot_mapping: expected at most max_num_batched_tokens = {CAPACITY} entries, got 41",
        ),
        ({"replay_start": ints([0])}, r"replay_start: expected len\(seq_lens\) = 2"),
        ({"seq_lens": ints([9, 9]).long()}, "seq_lens: expected torch.int32, got torch.int64"),
    ],
)
def test_bad_batch(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_builder().build(replace(make_batch([1, 3], [9, 9]), **changes))
