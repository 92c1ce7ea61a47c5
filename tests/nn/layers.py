"""A few small layers of every kind, as a model would hold them, and steps to run them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv41ops.nn import (
    AttentionGeometry,
    SparseMLAAttention,
    StepMetadata,
    YarnScaling,
    rope_table,
    step_metadata,
)

HIDDEN = 48
WINDOW = 12
PAGES = 12
PAGE = 4  # tokens of a page, in both caches
POSITIONS = 48
COMMON = {
    "hidden_size": HIDDEN,
    "num_heads": 4,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 8,
    "num_swa_pages": PAGES,
    "swa_page_size": PAGE,
    "swa_cache_dtype": "bf16",
}
KV_SOURCE = {
    "is_kv_source": True,
    "num_pages": PAGES,
    "block_size": PAGE,
    "cache_dtype": "bf16",
    "max_requests": 3,
    "num_drafts": 2,
}
INDEXED = {"is_index_source": True, "index_num_heads": 2, "index_topk": 5}
KINDS = {
    "window": {},
    "c2a source": dict(compress_ratio=2, **KV_SOURCE, **INDEXED),
    "c2a reuse": {"compress_ratio": 2, "block_size": PAGE},
    "c2a selects": dict(compress_ratio=2, block_size=PAGE, **INDEXED),
    "c1a source": dict(
        compress_ratio=1, num_candidate_blocks=2, candidate_block_size=4, **KV_SOURCE, **INDEXED
    ),
    "c1a selects": dict(compress_ratio=1, block_size=PAGE, candidate_block_size=4, **INDEXED),
    "c1a reuse": {"compress_ratio": 1, "block_size": PAGE},
}
SOURCES = {
    "c2a reuse": "c2a source",
    "c2a selects": "c2a source",
    "c1a selects": "c1a source",
    "c1a reuse": "c1a source",
}


def geometry(kind: str, **changes: object) -> AttentionGeometry:
    return AttentionGeometry(**{**COMMON, **KINDS[kind], **changes})


class LayerOutputs(NamedTuple):
    """Per layer, stacked; ``states`` of those that have a selection, in order."""

    out: Tensor  # [layers, T, HIDDEN]
    lse: Tensor  # [layers, T, H]
    states: Tensor  # [layers with a compressed cache, T, K]


class Layers(nn.Module):
    """One layer of each kind; each has an input of its own."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, kinds: tuple[str, ...] = tuple(KINDS)
    ) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList(SparseMLAAttention(geometry(kind), dtype) for kind in kinds)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                values = torch.randn(parameter.shape, generator=generator)
                if name.endswith("norm.weight"):
                    values = 1 + values / 10
                elif values.dim() == 2:
                    values *= values.shape[1] ** -0.5
                parameter.copy_(values)
        self.register_buffer("rope", rope_table(POSITIONS, 10000.0))
        self.register_buffer("compressed_rope", rope_table(POSITIONS, 160000.0, YarnScaling()))

    def layer(self, kind: str) -> SparseMLAAttention:
        return self.layers[self.kinds.index(kind)]

    def forward(
        self,
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        request_slots: Tensor,
        swa_block_table: Tensor,
        block_table: Tensor,
    ) -> LayerOutputs:
        metadata = step_metadata(
            query_start_loc,
            seq_lens,
            x.shape[0],
            swa_block_table,
            PAGE,
            self.rope,
            block_table_c1a=block_table,
            block_table_c2a=block_table,
            block_size=PAGE,
            compressed_cos_sin=self.compressed_rope,
            request_slots=request_slots,
            window=WINDOW,
        )
        outs, lses, states, selection = [], [], [], None
        for number, layer in enumerate(self.layers):
            source = None
            if self.kinds[number] in SOURCES:
                source = self.layer(SOURCES[self.kinds[number]]).compressed_cache
            out, lse, selection = layer(x[:, number], metadata, source, selection)
            outs.append(out)
            lses.append(lse)
            if selection is not None:
                states.append(selection.states)
        return LayerOutputs(torch.stack(outs), torch.stack(lses), torch.stack(states))


@dataclass
class Sequence:
    """One request: its inputs, pages and progress."""

    x: Tensor  # [n, layers, HIDDEN]
    slot: int
    pages: list[int]
    done: int = 0


class Step(NamedTuple):
    """Arguments of ``Layers.forward``."""

    x: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    request_slots: Tensor
    swa_block_table: Tensor
    block_table: Tensor


def metadata_of(step: Step, **changes: object) -> StepMetadata:
    """Of a step on the CPU, as ``Layers`` makes it, with some arguments changed."""
    table = rope_table(POSITIONS, 10000.0)
    arguments = {
        "query_start_loc": step.query_start_loc,
        "seq_lens": step.seq_lens,
        "num_tokens": len(step.x),
        "swa_block_table": step.swa_block_table,
        "swa_page_size": PAGE,
        "cos_sin": table,
        "block_table_c1a": step.block_table,
        "block_table_c2a": step.block_table,
        "block_size": PAGE,
        "compressed_cos_sin": table,
        "request_slots": step.request_slots,
        "window": WINDOW,
    }
    return step_metadata(**{**arguments, **changes})


def new_sequences(dtype: torch.dtype, num_layers: int = len(KINDS)) -> list[Sequence]:
    """Two requests, with pages in no order."""
    generator = torch.Generator().manual_seed(7)
    pages = torch.randperm(PAGES, generator=generator).tolist()
    lengths, slots = (31, 16), (2, 0)
    cuts = [pages[:8], pages[8:]]
    return [
        Sequence(torch.randn(n, num_layers, HIDDEN, generator=generator).to(dtype), slot, held)
        for n, slot, held in zip(lengths, slots, cuts, strict=True)
    ]


def make_step(parts: list[tuple[Sequence, int]], padding: int = 0) -> Step:
    """The next tokens of some requests, and padding: an absent third request and absent tokens."""
    counts = [count for _, count in parts]
    starts = [sum(counts[:row]) for row in range(len(parts) + 1)]
    rows = [one.x[one.done : one.done + count] for one, count in parts]
    like = parts[0][0].x
    x = torch.cat([*rows, like.new_zeros(padding, *like.shape[1:])])
    table = torch.full((3, POSITIONS // PAGE), -1, dtype=torch.int32)
    seq_lens = torch.zeros(3, dtype=torch.int32)
    slots = torch.full((3,), 3)
    for row, (one, count) in enumerate(parts):
        one.done += count
        seq_lens[row], slots[row] = one.done, one.slot
        table[row, : len(one.pages)] = torch.tensor(one.pages)
    starts += [starts[-1]] * (3 - len(parts))
    return Step(x, torch.tensor(starts, dtype=torch.int32), seq_lens, slots, table, table.clone())


def mixed_steps(dtype: torch.dtype, num_layers: int = len(KINDS)) -> list[Step]:
    """Chunks, decodes and padding of both requests."""
    long, short = new_sequences(dtype, num_layers)
    plan = [
        ([(long, 7), (short, 4)], 2),
        ([(short, 1), (long, 9)], 0),
        ([(long, 1)], 0),
        ([(short, 11), (long, 4)], 3),
        ([(long, 10)], 1),
    ]
    return [make_step(parts, padding) for parts, padding in plan]


def run_sequence(module: nn.Module, dtype: torch.dtype, device: torch.device) -> LayerOutputs:
    """Outputs of the long request at every position, from all of ``mixed_steps``."""
    found = []
    for step in mixed_steps(dtype):
        outputs = module(*(tensor.to(device) for tensor in step))
        for row, slot in enumerate(step.request_slots.tolist()):
            if slot == 2:
                tokens = slice(*step.query_start_loc[row : row + 2].tolist())
                found.append([part[:, tokens].cpu() for part in outputs])
    return LayerOutputs(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))
