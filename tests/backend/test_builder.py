"""The compressed-cache builders: every field, every buffer, every error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv41ops.backend import (
    CommonAttentionMetadata,
    DCPGeometry,
    FlashMLASparseDSV41MetadataBuilder,
    SparseMLAMetadataBuilder,
)
from tests import oracles
from tests.backend.batches import (
    BATCHES,
    expected_requests,
    expected_slots,
    ints,
    make_batch,
    tensors_of,
    whole_storage,
)

BLOCK_SIZE = 16
CAPACITY = 40
BUILDERS = [SparseMLAMetadataBuilder, FlashMLASparseDSV41MetadataBuilder]
Builder = SparseMLAMetadataBuilder

# World, interleave in states; each divides the 8 states of a page at ratio 2.
SHARDS = [(2, 1), (2, 4), (3, 2), (4, 8)]


def make_builder(
    cls: type[Builder] = FlashMLASparseDSV41MetadataBuilder, ratio: int = 2, **options: Any
) -> Builder:
    defaults: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "compress_ratio": ratio,
        "max_num_batched_tokens": CAPACITY,
        "index_topk": 24,
        "num_speculative_tokens": 2,
    }
    return cls(**{**defaults, **options})


@pytest.fixture(params=BATCHES)
def batch(request: pytest.FixtureRequest, device: torch.device) -> CommonAttentionMetadata:
    query_lens, seq_lens, padding = BATCHES[request.param]
    return make_batch(query_lens, seq_lens, padding=padding, device=device)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("cls", BUILDERS)
def test_every_field(
    cls: type[Builder], ratio: int, batch: CommonAttentionMetadata, device: torch.device
) -> None:
    builder = make_builder(cls, ratio, device=device)
    metadata = builder.build(batch)
    num_tokens = len(batch.slot_mapping)

    assert metadata.num_reqs == batch.num_reqs
    assert metadata.max_query_len == batch.max_query_len
    assert metadata.max_seq_len == batch.max_seq_len
    assert metadata.num_actual_tokens == batch.num_actual_tokens
    assert metadata.query_start_loc is batch.query_start_loc
    assert metadata.seq_lens is batch.seq_lens
    assert metadata.block_table is batch.block_table_tensor
    assert metadata.block_size == BLOCK_SIZE
    assert metadata.topk_tokens == 24
    assert metadata.cp_kv_cache_interleave_size == 1
    assert metadata.dcp_local_seq_lens is None

    assert metadata.req_id_per_token.dtype == torch.int32
    assert metadata.req_id_per_token.tolist() == expected_requests(batch, num_tokens)
    if ratio == 1:
        assert metadata.slot_mapping is batch.slot_mapping
    else:
        assert metadata.slot_mapping.dtype == torch.int64
        slots = expected_slots(batch, num_tokens, BLOCK_SIZE // 2, 2)
        assert metadata.slot_mapping.tolist() == slots


def test_a_known_batch(device: torch.device) -> None:
    """By hand: pages of 16 tokens are 8 states; odd positions close one."""
    batch = make_batch([1, 4], [20, 4], padding=1, device=device)
    table = ints([[5, 7, 2], [3, 1, 4]]).reshape(2, 3).to(device)
    metadata = make_builder(device=device).build(replace(batch, block_table_tensor=table))
    # Position 19 closes state 9, row 1 of page 7; positions 1 and 3 close states 0 and 1 of page 3.
    assert metadata.slot_mapping.tolist() == [57, -1, 24, -1, 25, -1]
    assert metadata.req_id_per_token.tolist() == [0, 1, 1, 1, 1, -1]


@pytest.mark.parametrize("ratio", [1, 2])
def test_whole_buffers_are_filled(ratio: int, device: torch.device) -> None:
    """-1 past the tokens of the step, whatever the step before left there."""
    builder = make_builder(ratio=ratio, dcp=DCPGeometry(2, 1), device=device)
    local = builder.dcp_local_seq_lens_buffer
    assert local is not None
    builder.build(make_batch([12, 20], [12, 63], device=device))
    assert (builder.req_id_per_token_buffer[:32] >= 0).all()
    assert (local[:2] > 0).all()
    builder.build(make_batch([2], [8], padding=1, device=device))
    assert local.tolist() == [8 // ratio // 2] + [0] * (CAPACITY - 1)
    assert builder.req_id_per_token_buffer.tolist() == [0, 0] + [-1] * (CAPACITY - 2)
    slots = builder.compressed_slot_mapping_buffer
    assert (slots[2:] == -1).all()
    assert (slots[1] >= 0) == (ratio == 2)


def test_buffers_are_allocated_once(device: torch.device) -> None:
    builder = make_builder(device=device, dcp=DCPGeometry(2, 0, 2))
    buffers = {
        name: value for name, value in vars(builder).items() if isinstance(value, torch.Tensor)
    }
    described = {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
    assert described == {
        "req_id_per_token_buffer": (torch.int32, (CAPACITY,)),
        "compressed_slot_mapping_buffer": (torch.int64, (CAPACITY,)),
        "dcp_local_seq_lens_buffer": (torch.int32, (CAPACITY,)),
    }
    addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    for query_lens, seq_lens, padding in BATCHES.values():
        metadata = builder.build(make_batch(query_lens, seq_lens, padding=padding, device=device))
        assert metadata.dcp_local_seq_lens is not None
        found = {
            "req_id_per_token_buffer": metadata.req_id_per_token,
            "compressed_slot_mapping_buffer": metadata.slot_mapping,
            "dcp_local_seq_lens_buffer": metadata.dcp_local_seq_lens,
        }
        for name, tensor in found.items():
            assert getattr(builder, name) is buffers[name]
            assert buffers[name].data_ptr() == addresses[name]
            if tensor.numel():
                assert tensor.data_ptr() == addresses[name]


def test_two_builders_share_nothing(device: torch.device) -> None:
    first, second = make_builder(device=device), make_builder(device=device)
    metadata = first.build(make_batch([2], [6], device=device))
    kept = metadata.slot_mapping.clone(), metadata.req_id_per_token.clone()
    second.build(make_batch([1, 1], [9, 9], device=device))
    assert torch.equal(metadata.slot_mapping, kept[0])
    assert torch.equal(metadata.req_id_per_token, kept[1])


@pytest.mark.parametrize("dcp", [DCPGeometry(), DCPGeometry(2, 1, 4)])
@pytest.mark.parametrize("ratio", [1, 2])
def test_nothing_of_the_callers_is_written(
    ratio: int, dcp: DCPGeometry, batch: CommonAttentionMetadata, device: torch.device
) -> None:
    """Not one byte: neither between the rows of a strided table, nor a page number below 0."""
    if batch.block_table_tensor.numel():
        batch.block_table_tensor[:, -1] = -1  # vLLM's builder clamps it in place
    tensors = tensors_of(batch)
    before = {name: whole_storage(tensor) for name, tensor in tensors.items()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    make_builder(ratio=ratio, dcp=dcp, device=device).build(batch)
    for name, tensor in tensors.items():
        assert getattr(batch, name) is tensor
        assert torch.equal(whole_storage(tensor), before[name]), name
        assert tensor._version == versions[name], name


def test_block_table_narrower_than_its_storage(device: torch.device) -> None:
    """A state past the table gives -1, not the page number that lies behind the row."""
    batch = make_batch([2], [34], pages=2, device=device)
    assert make_builder(device=device).build(batch).slot_mapping.tolist() == [-1, -1]


@pytest.mark.parametrize("world", [1, 2])
def test_replayed_tokens(world: int, device: torch.device) -> None:
    """-1 in the slots marks a replayed token with one rank, another rank's token under DCP."""
    slots = [-1, -1, -1, 8, 9, 10]
    batch = make_batch([6], [6], slot_mapping=slots, device=device)
    found = [-1] * 6
    for rank in range(world):
        metadata = make_builder(device=device, dcp=DCPGeometry(world, rank)).build(batch)
        shard = oracles.Shard(world, rank)
        replayed = slots if world == 1 else None
        expected = expected_slots(batch, 6, BLOCK_SIZE // 2, 2, shard, replayed)
        assert metadata.slot_mapping.tolist() == expected
        found = [max(pair) for pair in zip(found, expected, strict=True)]
    assert [slot >= 0 for slot in found] == [False, world > 1, False, True, False, True]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_replay_slot_mapping(world: int, dtype: torch.dtype, device: torch.device) -> None:
    """The one way to name replayed tokens under DCP; with one rank it wins over the slots."""
    replayed = [-1, -1, 0, 0, 0, 0]
    batch = make_batch(
        [6],
        [6],
        slot_mapping=[-1] * 6,
        replay_slot_mapping=ints(replayed, dtype).to(device),
        device=device,
    )
    written = set()
    for rank in range(world):
        metadata = make_builder(device=device, dcp=DCPGeometry(world, rank)).build(batch)
        shard = oracles.Shard(world, rank)
        expected = expected_slots(batch, 6, BLOCK_SIZE // 2, 2, shard, replayed)
        assert metadata.slot_mapping.tolist() == expected
        written |= {token for token, slot in enumerate(expected) if slot >= 0}
    assert written == {3, 5}


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("world", "interleave"), SHARDS)
def test_dcp_rank_by_rank(
    world: int, interleave: int, ratio: int, batch: CommonAttentionMetadata, device: torch.device
) -> None:
    """Each rank is right by the oracle, and every closed state has one rank."""
    num_tokens = len(batch.slot_mapping)
    closed = [slot >= 0 for slot in expected_slots(batch, num_tokens, BLOCK_SIZE // ratio, ratio)]
    owners = [0] * num_tokens
    states = [0] * batch.num_reqs
    for rank in range(world):
        builder = make_builder(ratio=ratio, device=device, dcp=DCPGeometry(world, rank, interleave))
        metadata = builder.build(batch)
        shard = oracles.Shard(world, rank, interleave)
        assert metadata.cp_kv_cache_interleave_size == interleave
        assert metadata.dcp_local_seq_lens is not None
        assert metadata.dcp_local_seq_lens.dtype == torch.int32
        local = metadata.dcp_local_seq_lens.tolist()
        assert local == oracles.dcp_local_seq_lens(batch.seq_lens.tolist(), ratio, shard)
        states = [a + b for a, b in zip(states, local, strict=True)]
        if ratio == 1:
            # The engine's own mapping: its -1 for other ranks' tokens stays what it is.
            assert metadata.slot_mapping is batch.slot_mapping
        else:
            slots = expected_slots(batch, num_tokens, BLOCK_SIZE // 2, 2, shard)
            assert metadata.slot_mapping.tolist() == slots
            owners = [a + (b >= 0) for a, b in zip(owners, slots, strict=True)]
    assert states == [length // ratio for length in batch.seq_lens.tolist()]
    if ratio == 2:
        assert owners == [int(is_closed) for is_closed in closed]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("ratio", [1, 2])
def test_non_causal_draft_blocks(ratio: int, world: int, device: torch.device) -> None:
    """A draft block closes the same states on the same ranks as a causal batch does."""
    causal = make_batch([3, 3], [19, 40], padding=2, device=device)
    for rank in range(world):
        dcp = DCPGeometry(world, rank, 2)
        built = [
            make_builder(ratio=ratio, device=device, dcp=dcp).build(batch)
            for batch in (causal, replace(causal, causal=False))
        ]
        for field in ("slot_mapping", "req_id_per_token"):
            assert torch.equal(getattr(built[0], field), getattr(built[1], field))
        if world > 1:
            assert built[0].dcp_local_seq_lens is not None
            assert built[1].dcp_local_seq_lens is not None
            assert torch.equal(built[0].dcp_local_seq_lens, built[1].dcp_local_seq_lens)


@pytest.mark.parametrize("drafts", [0, 2])
def test_split_follows_the_speculative_tokens(drafts: int) -> None:
    builder = make_builder(num_speculative_tokens=drafts)
    assert builder.reorder_batch_threshold == 1 + drafts
    counts = builder.split(make_batch([1, 3, 9], [9, 9, 9], padding=2))
    assert counts == ((1, 2, 1, 12) if drafts == 0 else (2, 1, 4, 9))


def test_requests_past_num_reqs_are_padding(device: torch.device) -> None:
    """Rows for a bucket of requests, ``num_reqs`` the real ones."""
    batch = make_batch([1, 2, 0, 0], [8, 4, 0, 0], device=device)
    metadata = make_builder(device=device).build(replace(batch, num_reqs=2))
    assert metadata.num_reqs == 2
    assert metadata.req_id_per_token.tolist() == [0, 1, 1]


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode(inside: bool, device: torch.device) -> None:
    """A builder made in inference mode serves outside it, and the other way round."""
    with torch.inference_mode(inside):
        builder = make_builder(device=device, dcp=DCPGeometry(2, 0))
    with torch.inference_mode(not inside):
        metadata = builder.build(make_batch([2], [6], device=device))
        assert metadata.req_id_per_token.tolist() == [0, 0]


@pytest.mark.parametrize("cls", BUILDERS)
@pytest.mark.parametrize("ratio", [0, 3, 4, -1])
def test_ratio_error(cls: type[Builder], ratio: int) -> None:
    with pytest.raises(ValueError, match=f"compress_ratio: expected 1 or 2, got {ratio}"):
        make_builder(cls, ratio)


@pytest.mark.parametrize("cls", BUILDERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 15}, "block_size: expected a multiple of compress_ratio = 2, got 15"),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: expected at least 1, got 0"),
        ({"index_topk": 0}, "index_topk: expected at least 1, got 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected at least 0, got -1"),
    ],
)
def test_argument_ranges(cls: type[Builder], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_builder(cls, **options)


@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "compress_ratio",
        "max_num_batched_tokens",
        "index_topk",
        "num_speculative_tokens",
    ],
)
@pytest.mark.parametrize("value", [2.0, "2", None, torch.tensor(2)])
def test_argument_types(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected an int, got {type(value).__name__}"):
        make_builder(**{name: value})


def test_base_builder_takes_interleave_one_only() -> None:
    message = "cp_interleave: expected 1 under DCP, got 4: SparseMLAMetadataBuilder"
    with pytest.raises(NotImplementedError, match=message):
        make_builder(SparseMLAMetadataBuilder, dcp=DCPGeometry(2, 0, 4))
    make_builder(SparseMLAMetadataBuilder, dcp=DCPGeometry(2, 0, 1))
    make_builder(SparseMLAMetadataBuilder, dcp=DCPGeometry(1, 0, 4))
    make_builder(FlashMLASparseDSV41MetadataBuilder, dcp=DCPGeometry(2, 0, 4))


def test_page_of_partial_runs() -> None:
    message = "states_per_page: expected a multiple of cp_interleave = 16 under DCP, got 8"
    with pytest.raises(ValueError, match=message):
        make_builder(dcp=DCPGeometry(2, 0, 16))
    make_builder(ratio=1, dcp=DCPGeometry(2, 0, 16))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"slot_mapping": torch.zeros(CAPACITY + 1, dtype=torch.int64)},
            f"slot_mapping: expected at most max_num_batched_tokens = {CAPACITY} entries, got 41",
        ),
        (
            {"num_actual_tokens": 5},
            r"num_actual_tokens: expected at most len\(slot_mapping\) = 4, got 5",
        ),
        ({"num_reqs": 3}, r"num_reqs: expected at most len\(seq_lens\) = 2, got 3"),
        (
            {"query_start_loc": ints([0, 1])},
            r"query_start_loc: expected len\(seq_lens\) \+ 1 = 3 entries, got 2",
        ),
        (
            {"query_start_loc": torch.zeros(3)},
            "query_start_loc: expected torch.int32, got torch.float32",
        ),
    ],
)
def test_bad_batch(ratio: int, changes: dict[str, Any], message: str) -> None:
    batch = replace(make_batch([1, 3], [9, 9]), **changes)
    with pytest.raises(ValueError, match=message):
        make_builder(ratio=ratio).build(batch)


def test_more_requests_than_the_dcp_buffer_holds() -> None:
    batch = make_batch([0] * (CAPACITY + 1), [0] * (CAPACITY + 1))
    message = f"seq_lens: expected at most max_num_batched_tokens = {CAPACITY} requests, got 41"
    with pytest.raises(ValueError, match=message):
        make_builder(dcp=DCPGeometry(2, 0)).build(batch)
    make_builder().build(batch)  # no buffer depends on the requests


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
def test_counts_are_host_numbers(name: str) -> None:
    batch = make_batch([1, 3], [9, 9])
    batch = replace(batch, **{name: torch.tensor(getattr(batch, name))})
    with pytest.raises(TypeError, match=f"{name}: expected an int, got a Tensor"):
        make_builder().build(batch)
