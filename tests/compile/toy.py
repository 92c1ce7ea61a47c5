"""A two-layer toy decode step that uses every op once or more, for the compile and export tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import dsv41ops

HEADS = 2
HIDDEN = 32
PAGE = 8  # rows of a page, in both caches
RATIO = 2
WINDOW = 8
PAGES = 64
TOPK = 4

HAS_CXX = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_cxx = pytest.mark.skipif(not HAS_CXX, reason="inductor needs a C++ compiler")


@contextmanager
def no_graph_cache() -> Iterator[None]:
    """Inductor's passes run, and count, even for a graph that an earlier run has compiled."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@dataclass
class Step:
    """Inputs of one step: every tensor that an engine changes between steps."""

    hidden: Tensor  # [T, HIDDEN] f32
    topk_indices: Tensor  # [T, TOPK] i32
    query_start_loc: Tensor  # [R + 1] i32
    seq_lens: Tensor  # [R] i32
    window_table: Tensor  # [R, P] i32
    block_table: Tensor  # [R, P] i32

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field) for field in self.__dataclass_fields__)


def make_step(
    T: int, R: int = 3, P: int = 40, seed: int = 0, device: torch.device | str = "cpu"
) -> Step:
    """A step of T tokens: the last token is padding when there is more than one."""
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.int32).to(device)

    cuts = sorted(torch.randint(0, max(T, 1), (R - 1,), generator=random).tolist())
    starts = [0, *cuts, T - 1 if T > 1 else T]
    query_start_loc = torch.tensor(starts, dtype=torch.int32).cummax(0).values.to(device)
    # Each request has its own pages: slots of one insert are unique.
    pages = torch.randperm(PAGES, generator=random)[: R * (PAGES // R)].view(R, PAGES // R)
    # clone: a [1, P] slice would keep the wide rows' stride, contiguous() or not.
    table = pages.to(torch.int32)[:, :P].clone(memory_format=torch.contiguous_format).to(device)
    query_lens = query_start_loc.diff()
    seq_lens = torch.minimum(
        query_lens + integers(0, 60, R), torch.tensor(table.shape[1] * PAGE, device=device)
    ).to(torch.int32)
    return Step(
        torch.randn(T, HIDDEN, generator=random).to(device),
        integers(-1, 40, T, TOPK),
        query_start_loc,
        seq_lens,
        table,
        table.flip(1),
    )


class Layer(nn.Module):
    """One attention layer with a window cache and a compressed cache of its own."""

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()

        def weight(rows: int, columns: int) -> nn.Buffer:
            values = torch.randn(rows, columns, generator=random)
            return nn.Buffer((values * rows**-0.5).to(torch.bfloat16))

        self.wq = weight(HIDDEN, HEADS * 512)
        self.wkv = weight(HIDDEN, 512)
        self.wo = weight(HEADS * 512, HIDDEN)
        self.sink = nn.Buffer(torch.randn(HEADS, generator=random))
        self.window = nn.Buffer(dsv41ops.new_kv_cache(PAGES, PAGE, "mxfp8"))
        self.compressed = nn.Buffer(dsv41ops.new_kv_cache(PAGES, PAGE, "nvfp4"))


class Toy(nn.Module):
    """Metadata, then per layer: two inserts, two partial decodes, their merge, a gather."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        self.layers = nn.ModuleList(Layer(random) for _ in range(layers))
        angles = torch.rand(PAGES * PAGE, 32, generator=random) * 6.3
        self.cos_sin = nn.Buffer(torch.cat([angles.cos(), angles.sin()], 1))

    def forward(
        self,
        hidden: Tensor,
        topk_indices: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        window_table: Tensor,
        block_table: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        T = hidden.shape[0]
        batch = (query_start_loc, seq_lens)
        request = dsv41ops.token_to_request(query_start_loc, T)
        local_lens = dsv41ops.dcp_local_seq_lens(seq_lens, RATIO, 1, 0)
        window_slots = dsv41ops.compressed_slot_mapping(*batch, window_table, T, PAGE, 1)
        slots = dsv41ops.compressed_slot_mapping(
            *batch, block_table, T, PAGE, RATIO, slot_mapping=window_slots
        )
        swa_indices, swa_lens = dsv41ops.sliding_window_indices(
            *batch, window_table, T, PAGE, window=WINDOW
        )
        selected, selected_lens = dsv41ops.topk_to_slots(
            topk_indices, *batch, block_table, PAGE, RATIO
        )
        shared = dsv41ops.decode_metadata(
            *batch, T, window_table, PAGE, block_table, block_table, RATIO * PAGE, WINDOW
        )
        near_window = (shared.swa_indices, shared.swa_lens)
        turns = (shared.positions, self.cos_sin)
        none = torch.zeros_like(swa_lens)
        for layer in self.layers:
            x = hidden.to(torch.bfloat16)
            kv = x @ layer.wkv
            q = (x @ layer.wq).view(-1, HEADS, 512)
            dsv41ops.kv_cache_insert(kv, window_slots, layer.window)
            dsv41ops.rope_kv_cache_insert(kv, *turns, slots, layer.compressed, RATIO)
            near = dsv41ops.sparse_mla_decode(q, layer.window, *near_window)
            chosen = (layer.compressed, selected, selected_lens)
            far = dsv41ops.sparse_mla_decode(
                *(q, layer.window, swa_indices, none, *chosen),
                positions=shared.positions,
                cos_sin=self.cos_sin,
            )
            outs, lses = (torch.stack(pair) for pair in zip(near, far, strict=True))
            out, _ = dsv41ops.merge_attention_states(outs, lses, layer.sink)
            newest = dsv41ops.kv_cache_gather(layer.window, window_slots)[:, :HIDDEN]
            hidden = hidden + (out.flatten(1) @ layer.wo).float()
            hidden = hidden + newest.float()
        return hidden, request, local_lens

    def caches(self) -> list[Tensor]:
        return [cache for layer in self.layers for cache in (layer.window, layer.compressed)]
