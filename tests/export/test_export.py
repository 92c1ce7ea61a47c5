"""What an exported program looks like, and a module that drops an output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import dsv41ops
from tests.contract.inputs import attention
from tests.export.conftest import export_step

OPS_PER_STEP = {
    "token_to_request": 1,
    "dcp_local_seq_lens": 1,
    "compressed_slot_mapping": 2,
    "sliding_window_indices": 1,
    "topk_to_slots": 1,
    "decode_metadata": 1,
    "kv_cache_insert": 2,
    "rope_kv_cache_insert": 2,
    "sparse_mla_decode": 4,
    "merge_attention_states": 2,
    "kv_cache_gather": 2,
}


@pytest.mark.parametrize("strict", [True, False])
def test_one_node_per_call_and_the_writes_in_the_signature(
    strict: bool, device: torch.device
) -> None:
    program = export_step(strict, device)
    targets = [str(node.target) for node in program.graph.nodes]
    for op, count in OPS_PER_STEP.items():
        assert targets.count(f"dsv41.{op}.default") == count, op
    assert not any("scalar" in target or "aten.item" in target for target in targets)
    written = program.run_decompositions().graph_signature.buffers_to_mutate
    caches = {f"layers.{n}.{name}" for n in (0, 1) for name in ("window", "compressed")}
    assert set(written.values()) == caches


class OnlyOut(nn.Module):
    """Drops ``lse``: an output of dynamic size that nobody uses."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(
        self,
        q: Tensor,
        swa_cache: Tensor,
        swa_indices: Tensor,
        swa_lens: Tensor,
        cache: Tensor | None = None,
        topk_indices: Tensor | None = None,
        topk_lens: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> Tensor:
        window = (swa_cache, swa_indices, swa_lens)
        selected = (cache, topk_indices, topk_lens)
        return dsv41ops.sparse_mla_decode(q, *window, *selected, attn_sink, **self.options)[0]


ONLY_OUT = {
    "defaults": ({}, {}),
    "sink": ({"sink": True}, {}),
    "everything": (
        {"sink": True, "compressed": "nvfp4"},
        {"softmax_scale": 0.125, "batch_invariant": True},
    ),
}
PER_TOKEN = ("q", "swa_indices", "swa_lens", "topk_indices", "topk_lens")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("given", ONLY_OUT)
def test_only_out(given: str, strict: bool, device: torch.device, tmp_path: Path) -> None:
    tensors, options = ONLY_OUT[given]
    module, T = OnlyOut(**options), Dim("T", min=1, max=1024)
    example = attention(5, device, **tensors)
    sizes = {name: {0: T} if name in PER_TOKEN else None for name in example}
    program = torch.export.export(module, (), example, dynamic_shapes=sizes, strict=strict)
    torch.export.save(program, tmp_path / "out.pt2")
    loaded = torch.export.load(tmp_path / "out.pt2").module()
    for tokens in (1, 2, 37):
        inputs = attention(tokens, device, **tensors)
        assert torch.equal(loaded(**inputs), module(**inputs))
