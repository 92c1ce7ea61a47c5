"""The recorded attention stack, and a run of the main job's model over its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv41ops.nn import AttentionGeometry, StepMetadata
from dsv41ops.nn.attention import Indexer
from graphs.batch import CacheGeometry
from graphs.config import ModelConfig
from graphs.dense import rotate
from graphs.model import CacheTypes, DecodeModel
from graphs.scheduler import Request, Scheduled, StepBuffers
from tests.golden.npz import Golden

SETTINGS = {"exact": ("bf16", "bf16"), "quantised": ("mxfp8", "nvfp4")}
MAX_TOKENS = 48
CPU = torch.device("cpu")


class Stack:
    """One KV setting of ``attention_stack.npz``."""

    def __init__(self, setting: str) -> None:
        self._golden, self.setting = Golden("attention_stack", CPU), setting
        config = bytes(self._golden.lists("config"))
        self.config = ModelConfig.from_dict(json.loads(config))
        self.token_ids = self._golden.tensor("token_ids")

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for key in self._golden.names():
            if key.startswith("w/"):
                tensor = self._golden.tensor(key)
                if tensor.dtype == torch.uint16:
                    tensor = tensor.view(torch.bfloat16).float()
                found[key.removeprefix("w/")] = tensor
        return found

    def recorded(self, name: str) -> Tensor:
        return self._golden.tensor(f"{self.setting}/{name}")

    def layer_inputs(self) -> list[Tensor]:
        """``[n, hidden]`` input of every layer, from the recorded attention outputs."""
        inputs = [self.weights()["embed.weight"][self.token_ids]]
        for layer in range(self.config.num_hidden_layers):
            inputs.append(inputs[-1] + self.recorded(f"attn_out_{layer}"))
        return inputs


@dataclass
class StackRun:
    """What the paged, chunked run gave per position of the recorded sequence."""

    attn_out: dict[int, Tensor] = field(default_factory=dict)
    lse: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)


class ExactIndexer(Indexer):
    """Float32 keys and queries, every state scored densely: what the recording did.

    The main job's index keys are FP8 records and its queries bfloat16; its selections cannot equal
    those of exact keys wherever two scores are within a hundredth of each other.
    """

    keys: Tensor  # [slots + 1, 128]; the last row takes what has no slot

    def __init__(self, geometry: AttentionGeometry, source: ExactIndexer | None) -> None:
        super().__init__(geometry, torch.float32)
        # In a list, so that it is no submodule of a second module.
        self.source = [source or self]
        if source is None:
            keys = torch.zeros(geometry.num_pages * geometry.states_per_page + 1, 128)
            self.register_buffer("keys", keys, persistent=False)

    def insert(self, latent: Tensor, metadata: StepMetadata, index_keys: Tensor) -> None:
        ratio = self.geometry.compress_ratio
        first = (metadata.positions // ratio * ratio).clamp(min=0)
        cos_sin = metadata.rope_of(ratio).table[first].unflatten(1, (2, 32))
        slots = metadata.state_slots(ratio)
        slots = torch.where(slots >= 0, slots, len(self.keys) - 1)
        self.keys[slots] = rotate(self.k_norm(self.wk(latent)), cos_sin)

    def forward(
        self,
        x: Tensor,
        q_latent: Tensor,
        metadata: StepMetadata,
        index_keys: Tensor,
        candidates: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """States, and as candidates a mask of states; only another one of these reads it."""
        geometry, ratio = self.geometry, self.geometry.compress_ratio
        row = torch.arange(geometry.states_per_page, device=x.device)
        pages = metadata.block_table(ratio).clamp(min=0).long()
        slots = (pages[:, :, None] * geometry.states_per_page + row).flatten(1)
        request = metadata.req_id_per_token.clamp(min=0).long()
        keys = self.source[0].keys[slots][request]  # [T, S, 128]
        cos_sin = metadata.rope_of(ratio).table[metadata.positions.clamp(min=0)]
        q = rotate(self.wq_b(q_latent).unflatten(1, (-1, 128)), cos_sin.unflatten(1, (2, 32)))
        products = torch.einsum("thd,tsd->ths", q, keys).relu()
        scores = torch.einsum("th,ths->ts", self.weights_proj(x) * self.scale, products)
        num_visible = (metadata.positions + 1) // ratio
        state = torch.arange(scores.shape[1], device=x.device)
        scores = scores.masked_fill(state >= num_visible[:, None], -torch.inf)
        if geometry.num_candidate_blocks:
            candidates = self._candidates(scores, num_visible)
        elif candidates is not None:
            scores = scores.masked_fill(~candidates, -torch.inf)
        best = scores.sort(dim=1, descending=True, stable=True)
        states = torch.where(best.values > -torch.inf, best.indices, scores.shape[1])
        states = states[:, : geometry.index_topk].sort(dim=1).values
        return torch.where(states < scores.shape[1], states, -1).int(), candidates

    def _candidates(self, scores: Tensor, num_visible: Tensor) -> Tensor:
        size = self.geometry.candidate_block_size
        best = scores.unflatten(1, (-1, size)).amax(2)
        block = torch.arange(best.shape[1], device=scores.device)
        best = best.masked_fill(block == ((num_visible - 1) // size)[:, None], torch.inf)
        order = best.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.geometry.num_candidate_blocks]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        return mask.repeat_interleave(size, 1)


def use_exact_indexers(model: DecodeModel) -> None:
    """Replace every indexer; those of one compressed cache share its keys."""
    config, made = model.config, {}
    for layer in config.index_source_layer_ids:
        attn = model.layers[layer].attn
        made[layer] = ExactIndexer(attn.geometry, made.get(config.kv_source(layer)))
        attn.indexer = made[layer]


def run_paged(
    stack: Stack,
    device: torch.device,
    seed: int,
    *,
    force_inputs: bool,
    force_selected: bool,
    exact_keys: bool = False,
) -> StackRun:
    """Decode the recorded tokens in random chunks on random pages, beside another request.

    ``force_inputs`` replaces every layer's input rows by the recorded ones, ``force_selected``
    every selection; both by forward hooks, so the model is the main job's own, but for its
    indexers with ``exact_keys``.
    """
    config, num_tokens = stack.config, len(stack.token_ids)
    generator = torch.Generator().manual_seed(seed)
    geometry = CacheGeometry(
        max_requests=3, max_positions=192, num_pages=8, num_swa_pages=16, block_size=64
    )
    model = DecodeModel(config, geometry, CacheTypes(*SETTINGS[stack.setting]))
    if exact_keys:
        use_exact_indexers(model)
    loaded = model.load_state_dict(stack.weights(), strict=False)
    assert loaded.unexpected_keys == []
    assert loaded.missing_keys == ["norm.weight", "head.weight"]
    model = model.to(device)
    pages = torch.randperm(8, generator=generator).tolist()
    swa_pages = torch.randperm(16, generator=generator).tolist()
    request = Request(stack.token_ids, 1, slot=1, pages=pages[:3])
    request.swa_pages = {index: swa_pages[index] for index in range(6)}
    other = Request(torch.arange(100) % config.vocab_size, 1, slot=0, pages=pages[3:5])
    other.swa_pages = {index: swa_pages[6 + index] for index in range(4)}

    run, inputs = StackRun(), stack.layer_inputs()
    rows = slice(0)  # of the recorded request, in the step at hand
    positions = slice(0)

    def replace_input(layer):
        def hook(module, args):
            hidden = args[0].clone()
            hidden[rows] = inputs[layer][positions].to(device)
            return (hidden, *args[1:])

        return hook

    def keep_output(layer):
        def hook(module, args, output):
            run.attn_out.setdefault(layer, []).append(output[0][rows].cpu())
            run.lse.setdefault(layer, []).append(output[1][rows].cpu())

        return hook

    def handle_selection(layer):
        def hook(module, args, output):
            states, candidates = output
            run.selected.setdefault(layer, []).append(states[rows].cpu())
            if not force_selected:
                return None
            states = states.clone()
            states[rows] = stack.recorded(f"selected_{layer}")[positions].to(device)
            return states, candidates

        return hook

    for layer, module in enumerate(model.layers):
        if force_inputs:
            module.register_forward_pre_hook(replace_input(layer))
        module.register_forward_hook(keep_output(layer))
        if module.attn.indexer is not None:
            module.attn.indexer.register_forward_hook(handle_selection(layer))

    buffers = StepBuffers(MAX_TOKENS, geometry, device)
    with torch.no_grad():
        while request.num_computed < num_tokens:
            chunk = int(torch.randint(1, 25, (1,), generator=generator))
            chunk = min(chunk, num_tokens - request.num_computed)
            plan = [Scheduled(request, request.num_computed, chunk)]
            beside = int(torch.randint(0, 20, (1,), generator=generator))
            beside = min(beside, len(other.prompt) - other.num_computed)
            first = int(torch.randint(0, 2, (1,), generator=generator))
            if beside:
                plan.insert(first, Scheduled(other, other.num_computed, beside))
            start = beside if beside and first == 0 else 0
            rows = slice(start, start + chunk)
            positions = slice(request.num_computed, request.num_computed + chunk)
            model(buffers.fill(plan))
            for part in plan:
                part.request.num_computed = part.end
    for kept in (run.attn_out, run.lse, run.selected):
        for layer, parts in kept.items():
            kept[layer] = torch.cat(parts)
    return run
