"""The builder of a whole step: what the others build, in one launch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv41ops
from dsv41ops.backend import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    DCPGeometry,
    FlashMLASparseDSV41MetadataBuilder,
    SlidingWindowMetadata,
    SlidingWindowMetadataBuilder,
    SparseMLAMetadata,
    StepMetadataBuilder,
)
from tests.backend.batches import BATCHES, ints, make_batch
from tests.backend.test_graph_safe import RejectSyncs, built_tensors

CAPACITY = 40
PAGE = 8
DRAFTS = 4
GEOMETRIES = {
    "one-rank": {1: DCPGeometry(), 2: DCPGeometry()},
    # Runs of 8 tokens: of 8 states at ratio 1, of 4 at ratio 2.
    "dcp": {ratio: DCPGeometry.from_token_interleave(2, 1, 8, ratio) for ratio in (1, 2)},
}
# Every batch as a causal one, and as draft blocks where it can be that.
FORMS = [(name, True) for name in BATCHES] + [
    (name, False)
    for name, (query_lens, _, _) in BATCHES.items()
    if max(query_lens, default=0) <= 1 + DRAFTS
]


def window_builder(dcp: DCPGeometry, **options: Any) -> SlidingWindowMetadataBuilder:
    return SlidingWindowMetadataBuilder(
        max_num_batched_tokens=CAPACITY,
        compress_ratios=[0, 2, 1],
        block_size=16,
        index_topk=8,
        page_size=PAGE,
        window=24,
        num_speculative_tokens=DRAFTS,
        dcp=dcp,
        **options,
    )


def compressed_builder(
    ratio: int, dcp: DCPGeometry, block_size: int = 16, **options: Any
) -> FlashMLASparseDSV41MetadataBuilder:
    return FlashMLASparseDSV41MetadataBuilder(
        block_size=block_size,
        compress_ratio=ratio,
        max_num_batched_tokens=CAPACITY,
        index_topk=8,
        num_speculative_tokens=DRAFTS,
        dcp=dcp,
        **options,
    )


def builders(
    geometry: dict[int, DCPGeometry], device: torch.device
) -> tuple[SlidingWindowMetadataBuilder, list[FlashMLASparseDSV41MetadataBuilder]]:
    window = window_builder(geometry[2], device=device)
    return window, [compressed_builder(ratio, geometry[ratio], device=device) for ratio in (1, 2)]


def batches(
    name: str, causal: bool, device: torch.device
) -> tuple[CommonAttentionMetadata, dict[int, CommonAttentionMetadata]]:
    """One batch, and the pages and slots that each cache has for it."""
    query_lens, seq_lens, padding = BATCHES[name]
    window, c1a, c2a = (
        make_batch(query_lens, seq_lens, padding=padding, causal=causal, device=device)
        for _ in range(3)
    )
    num_tokens = len(window.slot_mapping)
    replay_start = torch.randint(0, 30, (len(seq_lens),), dtype=torch.int32, device=device)
    replayed = torch.randint(-1, 3, (num_tokens,), dtype=torch.int32, device=device)
    window = replace(window, replay_start=replay_start)
    return window, {1: c1a, 2: replace(c2a, replay_slot_mapping=replayed)}


def assert_same(
    built: SparseMLAMetadata | SlidingWindowMetadata,
    expected: SparseMLAMetadata | SlidingWindowMetadata,
) -> None:
    for field in fields(expected):
        value = getattr(expected, field.name)
        if isinstance(value, int | None):
            assert getattr(built, field.name) == value, field.name
    found = built_tensors(built)
    for name, tensor in built_tensors(expected).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_what_the_builders_build(
    name: str, geometry: str, causal: bool, device: torch.device
) -> None:
    window_batch, compressed = batches(name, causal, device)
    window, parts = builders(GEOMETRIES[geometry], device)
    step = StepMetadataBuilder(window, *parts)
    with RejectSyncs() as mode:
        metadata = step.build(window_batch, compressed)
    assert [name for name in mode.seen if "slice" not in name] == ["decode_metadata_out.default"]
    other_window, others = builders(GEOMETRIES[geometry], device)
    assert_same(metadata.window, other_window.build(window_batch))
    for builder in others:
        ratio = builder.compress_ratio
        expected = builder.build(compressed[ratio])
        assert_same(metadata.compressed[ratio], expected)
        assert torch.equal(metadata.req_id_per_token, expected.req_id_per_token)
    geometry_of = window_batch.query_start_loc, window_batch.seq_lens
    num_tokens = len(window_batch.slot_mapping)
    slots = dsv41ops.compressed_slot_mapping(
        *geometry_of, window_batch.block_table_tensor, num_tokens, PAGE, 1
    )
    assert torch.equal(metadata.swa_slot_mapping, slots)
    for token, request in enumerate(metadata.req_id_per_token.tolist()):
        position = -1
        if request >= 0:
            left = window_batch.query_start_loc[request + 1].item() - token
            position = window_batch.seq_lens[request].item() - left
        assert metadata.positions[token].item() == max(position, -1)


def test_buffers_stay_and_are_filled_whole(device: torch.device) -> None:
    window, parts = builders(GEOMETRIES["dcp"], device)
    step = StepMetadataBuilder(window, *parts)

    def tensors() -> dict[str, Tensor]:
        owners = (step, window, *parts)
        return {
            f"{place}.{name}": value
            for place, owner in enumerate(owners)
            for name, value in vars(owner).items()
            if isinstance(value, Tensor)
        }

    addresses = {name: tensor.data_ptr() for name, tensor in tensors().items()}
    for name in ("full", "mixed", "nothing"):
        step.build(*batches(name, True, device))
        assert {name: tensor.data_ptr() for name, tensor in tensors().items()} == addresses
    for name, tensor in tensors().items():
        assert bool((tensor == (0 if "lens" in name else -1)).all()), name


def test_one_graph(device: torch.device) -> None:
    torch._dynamo.reset()
    window, parts = builders(GEOMETRIES["dcp"], device)
    step = StepMetadataBuilder(window, *parts)
    compiled = torch.compile(step.build, fullgraph=True, backend="aot_eager")
    window_batch, compressed = batches("mixed", True, device)
    metadata = compiled(window_batch, compressed)
    assert metadata.positions.data_ptr() == step.positions_buffer.data_ptr()
    other_window, others = builders(GEOMETRIES["dcp"], device)
    expected = StepMetadataBuilder(other_window, *others).build(window_batch, compressed)
    assert torch.equal(metadata.positions, expected.positions)
    assert_same(metadata.window, expected.window)
    for ratio, built in expected.compressed.items():
        assert_same(metadata.compressed[ratio], built)


def test_window_only_model(device: torch.device) -> None:
    step = StepMetadataBuilder(window_builder(DCPGeometry(), device=device))
    metadata = step.build(make_batch([1, 2], [9, 4], padding=1, device=device))
    assert metadata.req_id_per_token.tolist() == [0, 1, 1, -1]
    assert metadata.positions.tolist() == [8, 2, 3, -1]
    assert metadata.compressed == {}


def test_support_and_split() -> None:
    step = StepMetadataBuilder(window_builder(DCPGeometry()))
    assert step.get_cudagraph_support() is AttentionCGSupport.ALWAYS
    assert step.split(make_batch([1, 5, 9], [9, 9, 9])) == (2, 1, 6, 9)


def test_builders_that_do_not_go_together() -> None:
    window, c2a = window_builder(DCPGeometry()), compressed_builder(2, DCPGeometry())
    with pytest.raises(ValueError, match=r"compressed: expected a builder per .*, got \[2, 2\]"):
        StepMetadataBuilder(window, c2a, c2a)
    c1a = compressed_builder(1, DCPGeometry(), block_size=32)
    with pytest.raises(ValueError, match=r"block_size: expected one .*, got \[16, 32\]"):
        StepMetadataBuilder(window, c2a, c1a)
    c1a = compressed_builder(1, DCPGeometry(2, 1))
    with pytest.raises(ValueError, match=r"dcp: expected one rank .*, got \[\(1, 0\), \(2, 1\)\]"):
        StepMetadataBuilder(window, c1a)


def test_batches_that_do_not_go_together() -> None:
    step = StepMetadataBuilder(window_builder(DCPGeometry()), compressed_builder(2, DCPGeometry()))
    batch = make_batch([1, 2], [9, 4])
    with pytest.raises(ValueError, match=r"compressed: expected .* ratios \[2\], got \[\]"):
        step.build(batch)
    with pytest.raises(
        ValueError, match=r"compressed: expected 3 tokens and 2 requests .* 4 and 2"
    ):
        step.build(batch, {2: make_batch([1, 2], [9, 4], padding=1)})
    wrong = replace(batch, seq_lens=ints([9, 4], torch.int64))
    with pytest.raises(ValueError, match=r"seq_lens: expected torch\.int32"):
        step.build(wrong, {2: wrong})
