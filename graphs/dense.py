"""An independent check of the decode graph: one layer of one request, dense, in float64.

No pages, no ops, no steps: keys come from the whole sequence as one matrix. The layer's inputs
and the selected states are given, so that neither earlier layers' rounding nor a near-tie in an
indexer counts as this layer's error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv41ops.nn import rope_frequencies
from graphs.config import ModelConfig

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class DenseReference:
    """Attention layers of one model over whole sequences.

    Args:
        config: Model geometry.
        weights: Checkpoint names to tensors of any dtype.
        swa_cache_dtype: Record whose rounding window rows get.
        cache_dtype: The same for compressed rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        swa_cache_dtype: str,
        cache_dtype: str,
    ) -> None:
        self.config = config
        self.weights = weights
        self.swa_cache_dtype = swa_cache_dtype
        self.cache_dtype = cache_dtype

    def layer(
        self,
        layer: int,
        hidden: Tensor,
        positions: Tensor,
        source_hidden: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention output and lse of one layer at some positions of a sequence.

        Args:
            layer: Layer id.
            hidden: ``[n, hidden]`` inputs of the layer at positions 0 .. n-1.
            positions: ``[m]`` int64 positions to compute.
            source_hidden: ``[n, hidden]`` inputs of the layer that owns the compressed cache.
            selected: ``[m, K]`` states that each position attends to, -1: none.

        Returns:
            float64 ``[m, hidden]`` and ``[m, H]``.
        """
        config, ratio = self.config, self.config.ratio(layer)
        rope = self._rope(ratio > 0, len(hidden)).to(hidden.device)
        x = self._norm(hidden.double(), f"layers.{layer}.attn_norm")
        name = f"layers.{layer}.attn."
        keys = self._norm(self._linear(x, name + "wkv"), name + "kv_norm")
        keys = round_to_record(rotate(keys, rope), self.swa_cache_dtype)
        distance = positions[:, None] - torch.arange(len(hidden), device=hidden.device)
        visible = (distance >= 0) & (distance < config.sliding_window)
        if ratio:
            assert source_hidden is not None
            assert selected is not None
            states = self._states(config.kv_source(layer), ratio, source_hidden, rope)
            keys = torch.cat([keys, states])
            chosen = visible.new_zeros(len(positions), len(states) + 1)
            chosen.scatter_(1, selected.long() % (len(states) + 1), True)  # -1: the last column
            visible = torch.cat([visible, chosen[:, :-1]], 1)
        return self._attend(name, x[positions], rope[positions], keys, visible)

    def draft_layer(self, layer: int, context: Tensor, block: Tensor) -> Tensor:
        """Attention output of a draft layer for a block of tokens.

        Args:
            layer: Layer id.
            context: ``[n, hidden]`` outputs of the stack at positions 0 .. n-1.
            block: ``[m, hidden]`` inputs of the layer at the m positions after those.

        Returns:
            float64 ``[m, hidden]``.
        """
        window = context[-self.config.sliding_window :]
        rope = self._rope(False, len(context) + len(block))[len(context) - len(window) :]
        rope = rope.to(block.device)
        x = self._norm(torch.cat([window, block]).double(), f"layers.{layer}.attn_norm")
        name = f"layers.{layer}.attn."
        keys = self._norm(self._linear(x, name + "wkv"), name + "kv_norm")
        keys = round_to_record(rotate(keys, rope), self.swa_cache_dtype)
        visible = keys.new_ones(len(block), len(keys), dtype=torch.bool)
        out, _ = self._attend(name, x[len(window) :], rope[len(window) :], keys, visible)
        return out

    def _attend(
        self, name: str, x: Tensor, rope: Tensor, keys: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output and lse of tokens with layer inputs ``x [m, hidden]`` over ``keys [s, 512]``."""
        config = self.config
        q = self._norm(self._linear(x, name + "wq_a"), name + "q_norm")
        q = self._linear(q, name + "wq_b").unflatten(1, (-1, config.head_dim))
        q = rotate(q, rope)
        scores = torch.einsum("thd,sd->ths", q, keys) * config.head_dim**-0.5
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        lse = torch.logsumexp(scores, 2)
        out = scores.softmax(2) @ keys
        out = out * torch.sigmoid(lse - self.weights[name + "attn_sink"].double())[:, :, None]
        out = rotate(out, rope, inverse=True)
        grouped = out.flatten(1).unflatten(1, (config.o_groups, -1))
        wo_a = self.weights[name + "wo_a.weight"].double().unflatten(0, (config.o_groups, -1))
        low_rank = torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1)
        return self._linear(low_rank, name + "wo_b"), lse

    def _states(self, source: int, ratio: int, hidden: Tensor, rope: Tensor) -> Tensor:
        """Rows of the compressed cache: every group of the sequence that is closed."""
        x = self._norm(hidden.double(), f"layers.{source}.attn_norm")
        name = f"layers.{source}.attn.compressor."
        whole = len(x) // ratio * ratio
        kv = self._linear(x, name + "wkv")[:whole].unflatten(0, (-1, ratio))
        if ratio > 1:
            score = self._linear(x, name + "wgate")[:whole].unflatten(0, (-1, ratio))
            kv = kv * score.softmax(1)
        latent = self._norm(kv.sum(1), name + "norm")
        return round_to_record(rotate(latent, rope[:whole:ratio]), self.cache_dtype)

    def _rope(self, compressed: bool, num_positions: int) -> Tensor:
        """``[num_positions, 2, 32]`` cosines and sines."""
        theta, scaling = self.config.rope_theta, None
        if compressed:
            theta, scaling = self.config.compress_rope_theta, self.config.rope_scaling.yarn
        position = torch.arange(num_positions, dtype=torch.float64)
        angle = position[:, None] * rope_frequencies(theta, scaling)
        return torch.stack([angle.cos(), angle.sin()], 1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].double().T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"].double()


def rotate(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 64 of ``x [N, ..., D]`` by ``cos_sin [N, 2, 32]``; pairs are interleaved."""
    cos, sin = cos_sin.unbind(1)
    for _ in range(x.dim() - 2):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    half = cos.shape[-1]
    plain, turned = x.split([x.shape[-1] - 2 * half, 2 * half], -1)
    even, odd = turned.unflatten(-1, (half, 2)).unbind(-1)
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([plain, pairs.flatten(-2)], -1)


def round_to_record(rows: Tensor, record: str) -> Tensor:
    """float64 ``rows`` as a cache of this record gives them back."""
    if record == "bf16":
        return rows.bfloat16().double()
    if record == "fp8_ds_mla":
        return torch.cat([_round_e4m3(rows[:, :448], 64), rows[:, 448:].bfloat16().double()], 1)
    if record == "mxfp8":
        return _round_e4m3(rows, 32)
    assert record == "nvfp4"
    grouped: Tensor = rows.unflatten(1, (-1, 16))
    scale = (grouped.abs().amax(2, keepdim=True) / 6).clamp(2**-9, 448)
    scale = scale.to(torch.float8_e4m3fn).double()
    steps = torch.tensor(E2M1, dtype=torch.float64, device=rows.device)
    # The nearest step; of two equally near ones the even, by a tiny handicap for the odd.
    handicap = torch.arange(len(E2M1), device=rows.device) % 2 * 1e-9
    nearest = (((grouped / scale).abs()[..., None] - steps).abs() + handicap).argmin(-1)
    rounded: Tensor = steps[nearest] * grouped.sign() * scale
    return rounded.flatten(1)


def _round_e4m3(rows: Tensor, group: int) -> Tensor:
    grouped: Tensor = rows.unflatten(1, (-1, group))
    amax = grouped.abs().amax(2, keepdim=True).clamp(min=1e-4)
    scale = 2 ** (amax / 448).log2().ceil()
    rounded: Tensor = (grouped / scale).to(torch.float8_e4m3fn).double() * scale
    return rounded.flatten(1)
