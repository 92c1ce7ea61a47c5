"""Inductor calls the mutating ops on the caller's own memory: nothing is cloned, no byte missed.

The graphs hold our ops only, so that inductor writes a wrapper and compiles no C++.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import ReinplaceCounters

import dsv41ops
from tests.compile.toy import needs_cxx, no_graph_cache

T, HEADS, PAGES, PAGE = 4, 2, 4, 8

Body = Callable[..., Tensor]


class Inputs:
    """Rows to insert and attend to; slots of one insert are unique."""

    def __init__(self, device: torch.device) -> None:
        random = torch.Generator().manual_seed(0)
        self.q = torch.randn(T, HEADS, 512, generator=random).bfloat16().to(device)
        self.kv = torch.randn(T, 512, generator=random).bfloat16().to(device)
        self.slots = torch.arange(T, device=device)
        self.later_slots = self.slots + T
        self.indices = torch.arange(2 * T, dtype=torch.int32, device=device).repeat(T, 1)
        self.lens = torch.full((T,), 2 * T, dtype=torch.int32, device=device)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q, self.kv, self.slots, self.later_slots, self.indices, self.lens)


def one_layer(base: Tensor, q: Tensor, kv: Tensor, slots: Tensor, _, indices, lens) -> Tensor:
    dsv41ops.kv_cache_insert(kv, slots, base[0])
    return dsv41ops.sparse_mla_decode(q, base[0], indices, lens)[0]


def stacked_layers(base: Tensor, q: Tensor, kv: Tensor, slots: Tensor, _, indices, lens) -> Tensor:
    for cache in base.unbind():
        dsv41ops.kv_cache_insert(kv, slots, cache)
        q = dsv41ops.sparse_mla_decode(q, cache, indices, lens)[0]
        kv = q[:, 0]
    return q


def two_inserts_into_one_cache(
    base: Tensor, q: Tensor, kv: Tensor, slots: Tensor, later_slots: Tensor, indices, lens
) -> Tensor:
    dsv41ops.kv_cache_insert(kv, slots, base[0])
    dsv41ops.kv_cache_insert(q[:, 1], later_slots, base[0])
    return dsv41ops.sparse_mla_decode(q, base[0], indices, lens)[0]


def window_and_compressed_per_layer(
    base: Tensor, q: Tensor, kv: Tensor, slots: Tensor, later_slots: Tensor, indices, lens
) -> Tensor:
    for layer in range(base.shape[0] // 2):
        window, compressed = base[2 * layer], base[2 * layer + 1]
        dsv41ops.kv_cache_insert(kv, slots, window)
        dsv41ops.kv_cache_insert(kv, later_slots, compressed)
        selected = (compressed, indices, lens)
        q = dsv41ops.sparse_mla_decode(q, window, indices, lens, *selected)[0]
        kv = q[:, 0]
    return q


def insert_attend_insert_attend(
    base: Tensor, q: Tensor, kv: Tensor, slots: Tensor, later_slots: Tensor, indices, lens
) -> Tensor:
    for here in (slots, later_slots):
        dsv41ops.kv_cache_insert(kv, here, base[0])
        q = dsv41ops.sparse_mla_decode(q, base[0], indices, lens)[0]
        kv = q[:, 0]
    return q


BODIES = [
    one_layer,
    stacked_layers,
    two_inserts_into_one_cache,
    window_and_compressed_per_layer,
    insert_attend_insert_attend,
]


class Holder(nn.Module):
    """The cache as a module buffer instead of an input."""

    def __init__(self, base: Tensor, body: Body) -> None:
        super().__init__()
        self.base = nn.Buffer(base)
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.body(self.base, *inputs)


def new_base(device: torch.device) -> Tensor:
    return torch.zeros(4, PAGES, PAGE, 528, dtype=torch.uint8, device=device)


def compile_and_compare(body: Body, base: Tensor, inputs: Inputs, in_buffer: bool) -> None:
    eager_base = base.clone()
    expected = body(eager_base, *inputs.tensors())
    ReinplaceCounters.clear()
    with no_graph_cache():
        if in_buffer:
            module = torch.compile(Holder(base, body), fullgraph=True)
            result = module(*inputs.tensors())
        else:
            result = torch.compile(body, fullgraph=True)(base, *inputs.tensors())
    assert torch.equal(result, expected)
    assert torch.equal(base.view(torch.uint8), eager_base.view(torch.uint8))
    assert bool(base.view(torch.uint8).any())


@pytest.mark.parametrize("sizes", ["static", "unbacked"])
@pytest.mark.parametrize("held", ["input", "buffer"])
@pytest.mark.parametrize("body", BODIES)
def test_no_byte_is_missed(body: Body, held: str, sizes: str, device: torch.device) -> None:
    inputs = Inputs(device)
    if sizes == "unbacked":
        for tensor in inputs.tensors():
            mark_unbacked(tensor, 0)
    compile_and_compare(body, new_base(device), inputs, in_buffer=held == "buffer")
    assert ReinplaceCounters.get_total_missed() == 0
    assert ReinplaceCounters.get_total_missed_bytes() == 0


@needs_cxx
def test_the_counter_counts(device: torch.device) -> None:
    """The control: a dtype view of the cache inside the graph does cost copies of it."""

    def viewed(base: Tensor, *inputs: Tensor) -> Tensor:
        return one_layer(base.view(torch.uint8), *inputs)

    base = new_base(device).view(torch.float8_e4m3fn)
    compile_and_compare(viewed, base, Inputs(device), in_buffer=False)
    assert ReinplaceCounters.get_total_missed_bytes() >= PAGES * PAGE * 528


class Buffers(nn.Module):
    """Out-forms into whole buffers of a fixed address, of which a step fills a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Buffer(torch.full((32,), 5, dtype=torch.int64))
        self.indices = nn.Buffer(torch.full((32, 8), 5, dtype=torch.int32))
        self.lens = nn.Buffer(torch.full((32,), 5, dtype=torch.int32))
        # Of the fused op, all but what is left out.
        self.request = nn.Buffer(torch.full((32,), 5, dtype=torch.int32))
        self.positions = nn.Buffer(torch.full((32,), 5, dtype=torch.int64))
        self.swa_slots = nn.Buffer(torch.full((32,), 5, dtype=torch.int64))
        self.swa_indices = nn.Buffer(torch.full((32, 8), 5, dtype=torch.int32))
        self.swa_lens = nn.Buffer(torch.full((32,), 5, dtype=torch.int32))
        self.c1a_slots = nn.Buffer(torch.empty(0, dtype=torch.int64))
        self.c2a_slots = nn.Buffer(torch.full((32,), 5, dtype=torch.int64))
        self.c1a_lens = nn.Buffer(torch.empty(0, dtype=torch.int32))
        self.c2a_lens = nn.Buffer(torch.full((32,), 5, dtype=torch.int32))

    def forward(self, tokens: Tensor, starts: Tensor, seq_lens: Tensor, table: Tensor) -> None:
        batch = (starts, seq_lens, table, tokens.shape[0])
        dsv41ops.compressed_slot_mapping_out(*batch, PAGE, 2, out=self.slots)
        dsv41ops.sliding_window_indices_out(
            *batch, PAGE, window=8, out=self.indices, lens=self.lens
        )
        dsv41ops.decode_metadata_out(
            starts,
            seq_lens,
            tokens.shape[0],
            swa_block_table=table,
            swa_page_size=PAGE,
            block_table_c1a=table,
            block_table_c2a=table,
            block_size=2 * PAGE,
            window=8,
            req_id_per_token=self.request,
            positions=self.positions,
            swa_slot_mapping=self.swa_slots,
            swa_indices=self.swa_indices,
            swa_lens=self.swa_lens,
            compressed_slot_mapping_c1a=self.c1a_slots,
            compressed_slot_mapping_c2a=self.c2a_slots,
            dcp_local_seq_lens_c1a=self.c1a_lens,
            dcp_local_seq_lens_c2a=self.c2a_lens,
        )


def test_whole_buffers_take_unbacked_tokens(device: torch.device) -> None:
    compiled, eager = Buffers().to(device), Buffers().to(device)
    addresses = [buffer.data_ptr() for buffer in compiled.buffers()]
    run = torch.compile(compiled, fullgraph=True)
    seq_lens = torch.tensor([30, 40], dtype=torch.int32, device=device)
    table = torch.arange(12, dtype=torch.int32, device=device).view(2, 6)
    ReinplaceCounters.clear()
    for index, num_tokens in enumerate((9, 1, 32, 0)):
        tokens = torch.empty(num_tokens, device=device)
        starts = torch.tensor([0, num_tokens // 2, num_tokens], dtype=torch.int32, device=device)
        if index == 0:
            mark_unbacked(tokens, 0)
        with (
            no_graph_cache(),
            torch._dynamo.config.patch(error_on_recompile=index > 0),
        ):
            run(tokens, starts, seq_lens, table)
        eager(tokens, starts, seq_lens, table)
        for one, other in zip(compiled.buffers(), eager.buffers(), strict=True):
            assert torch.equal(one, other)
    assert addresses == [buffer.data_ptr() for buffer in compiled.buffers()]
    assert ReinplaceCounters.get_total_missed() == 0
