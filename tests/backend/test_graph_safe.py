"""``build`` never waits for the device, and is one graph under ``torch.compile``."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv41ops.backend import (
    CommonAttentionMetadata,
    DCPGeometry,
    FlashMLASparseDSV41MetadataBuilder,
    SlidingWindowMetadata,
    SlidingWindowMetadataBuilder,
    SparseMLAMetadata,
    SparseMLAMetadataBuilder,
)
from tests.backend.batches import BATCHES, make_batch, tensors_of

CAPACITY = 40
DRAFTS = 8
RANKS = {"one-rank": DCPGeometry(), "dcp": DCPGeometry(2, 1, 2)}
# Each of these returns a value, or a shape that follows values, to the host.
SYNCS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten._unique2.default,
}


class RejectSyncs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        assert func not in SYNCS, f"{func} is a host sync"
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        assert len(devices) <= 1, f"{func} copies between {devices}"
        return result


def make_builders(
    ratio: int, dcp: DCPGeometry, device: torch.device | str
) -> tuple[SparseMLAMetadataBuilder, SlidingWindowMetadataBuilder]:
    builder = FlashMLASparseDSV41MetadataBuilder(
        block_size=16,
        compress_ratio=ratio,
        max_num_batched_tokens=CAPACITY,
        index_topk=8,
        num_speculative_tokens=DRAFTS,
        dcp=dcp,
        device=device,
    )
    window_builder = SlidingWindowMetadataBuilder(
        max_num_batched_tokens=CAPACITY,
        compress_ratios=[0, 2, 1],
        block_size=16,
        index_topk=8,
        page_size=8,
        window=24,
        num_speculative_tokens=DRAFTS,
        dcp=dcp,
        device=device,
    )
    return builder, window_builder


def built_tensors(metadata: SparseMLAMetadata | SlidingWindowMetadata) -> dict[str, Tensor]:
    found = {}
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
    if isinstance(metadata, SlidingWindowMetadata):
        for kind, plan in metadata.plans.items():
            found[f"{kind.name}.swa_indices"] = plan.swa_indices
            found[f"{kind.name}.swa_lens"] = plan.swa_lens
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("dcp", RANKS.values(), ids=RANKS)
def test_no_host_sync(dcp: DCPGeometry, ratio: int, causal: bool, device: torch.device) -> None:
    builders = make_builders(ratio, dcp, device)
    batch = make_batch([1, 3, 0], [40, 21, 0], padding=4, causal=causal, device=device)
    with RejectSyncs() as mode:
        for builder in builders:
            builder.build(batch)
    # A launch each, and no copy beside it.
    assert [name for name in mode.seen if "slice" not in name] == 2 * [
        "decode_metadata_out.default"
    ]


def test_the_mode_sees_syncs() -> None:
    with RejectSyncs(), pytest.raises(AssertionError, match="host sync"):
        torch.ones(1).item()
    with RejectSyncs(), pytest.raises(AssertionError, match="host sync"):
        torch.ones(3).nonzero()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("dcp", RANKS.values(), ids=RANKS)
def test_fake_tensors(dcp: DCPGeometry, ratio: int, causal: bool, device: torch.device) -> None:
    """Tensors without values: only shapes may be asked."""
    batch = make_batch([1, 3, 0], [40, 21, 0], padding=4, causal=causal)
    with FakeTensorMode(allow_non_fake_inputs=False):
        fakes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in tensors_of(batch).items()
            if name != "query_start_loc_cpu"
        }
        builder, window_builder = make_builders(ratio, dcp, device)
        fake_batch = replace(batch, query_start_loc_cpu=None, **fakes)
        built = [builder.build(fake_batch), window_builder.build(fake_batch)]
    for metadata in built:
        for name, tensor in built_tensors(metadata).items():
            assert tensor.device.type == device.type, name
    assert built_tensors(built[0])["slot_mapping"].shape == (8,)
    assert built_tensors(built[1])["C2A.swa_indices"].shape == (8, 24 if causal else 64)


def assert_compiled_as_eager(
    compiled: Any, eager: Any, batch: CommonAttentionMetadata, device: torch.device
) -> None:
    for found, expected in zip(compiled(batch), eager(batch), strict=True):
        assert type(found) is type(expected)
        for field in fields(expected):
            value = getattr(expected, field.name)
            if isinstance(value, int | None):
                assert getattr(found, field.name) == value, field.name
        actual = built_tensors(found)
        for name, tensor in built_tensors(expected).items():
            assert actual[name].dtype == tensor.dtype, name
            assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("dcp", RANKS.values(), ids=RANKS)
def test_aot_eager(dcp: DCPGeometry, ratio: int, device: torch.device) -> None:
    compare_compiled("aot_eager", dcp, ratio, device)


def test_inductor(device: torch.device) -> None:
    compare_compiled("inductor", RANKS["dcp"], 2, device)


def compare_compiled(backend: str, dcp: DCPGeometry, ratio: int, device: torch.device) -> None:
    """One graph each for causal and non-causal batches of a bucket, whatever they hold."""
    torch._dynamo.reset()
    builders = make_builders(ratio, dcp, device)
    others = make_builders(ratio, dcp, device)
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(batch: CommonAttentionMetadata) -> tuple[Any, Any]:
        return builders[0].build(batch), builders[1].build(batch)

    def eager(batch: CommonAttentionMetadata) -> tuple[Any, Any]:
        return others[0].build(batch), others[1].build(batch)

    # One bucket: 12 tokens, 3 requests, and the limits that an engine would pass for it.
    limits = {"num_reqs": 3, "num_actual_tokens": 12, "max_query_len": 9, "max_seq_len": 64}
    contents: list[tuple[list[int], list[int]]] = [
        ([1, 1, 1], [40, 1, 17]),
        ([1, 3, 8], [40, 21, 9]),
        ([2, 0, 0], [63, 0, 0]),
        ([0, 0, 0], [0, 0, 0]),
    ]
    for causal in (True, False):
        for query_lens, seq_lens in contents:
            padding = 12 - sum(query_lens)
            batch = make_batch(query_lens, seq_lens, padding=padding, causal=causal, device=device)
            batch = replace(batch, query_start_loc_cpu=None, **limits)
            assert_compiled_as_eager(compiled, eager, batch, device)
        assert counter.frame_count == (1 if causal else 2)
    for builder, other in zip(builders, others, strict=True):
        for name, buffer in vars(builder).items():
            if isinstance(buffer, Tensor):
                assert torch.equal(buffer, getattr(other, name)), name


def test_one_graph_for_every_bucket(device: torch.device) -> None:
    """With tokens and requests marked dynamic, other sizes need no other graph."""
    torch._dynamo.reset()
    builders = make_builders(2, RANKS["dcp"], device)
    others = make_builders(2, RANKS["dcp"], device)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(batch: CommonAttentionMetadata) -> tuple[Any, Any]:
        return builders[0].build(batch), builders[1].build(batch)

    def eager(batch: CommonAttentionMetadata) -> tuple[Any, Any]:
        return others[0].build(batch), others[1].build(batch)

    limits = {"num_reqs": 2, "num_actual_tokens": 2, "max_query_len": 9, "max_seq_len": 64}
    sizes = [([1, 3, 9], [40, 21, 9], 3), ([1, 1], [40, 1], 0), ([2, 5, 0, 0], [12, 5, 0, 0], 30)]
    for query_lens, seq_lens, padding in sizes:
        batch = make_batch(query_lens, seq_lens, padding=padding, device=device)
        batch = replace(batch, query_start_loc_cpu=None, **limits)
        for tensor in tensors_of(batch).values():
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_compiled_as_eager(compiled, eager, batch, device)
    assert counter.frame_count == 1


def test_compiled_build_keeps_addresses(device: torch.device) -> None:
    torch._dynamo.reset()
    builder, window_builder = make_builders(2, RANKS["dcp"], device)
    compiled = torch.compile(builder.build, fullgraph=True, backend="aot_eager")
    window_compiled = torch.compile(window_builder.build, fullgraph=True, backend="aot_eager")
    query_lens, seq_lens, padding = BATCHES["mixed"]
    batch = make_batch(query_lens, seq_lens, padding=padding, device=device)
    for _ in range(2):
        metadata, window = compiled(batch), window_compiled(batch)
        assert metadata.dcp_local_seq_lens is not None
        for tensor, buffer in [
            (metadata.req_id_per_token, builder.req_id_per_token_buffer),
            (metadata.slot_mapping, builder.compressed_slot_mapping_buffer),
            (metadata.dcp_local_seq_lens, builder.dcp_local_seq_lens_buffer),
            (window.plan(0).swa_indices, window_builder.swa_indices_buffer),
            (window.plan(0).swa_lens, window_builder.swa_lens_buffer),
        ]:
            assert buffer is not None
            assert tensor.data_ptr() == buffer.data_ptr()


def test_compiled_errors_name_the_argument() -> None:
    builder, _ = make_builders(2, DCPGeometry(), "cpu")
    batch = make_batch([1], [9])
    batch = replace(batch, slot_mapping=torch.zeros(CAPACITY + 1, dtype=torch.int64))
    message = "slot_mapping: expected at most max_num_batched_tokens = 40"
    with pytest.raises(Exception, match=message):
        torch.compile(builder.build, fullgraph=True, backend="eager")(batch)
