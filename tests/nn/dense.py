"""One layer over one whole sequence in float64: no pages, no steps, no ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv41ops.nn import SparseMLAAttention
from tests.nn.layers import WINDOW

EPS = 1e-20


class Dense:
    """A layer's arithmetic with its own weights.

    Args:
        attn: The module; only its parameters and geometry are used.
        table: ``[N, 64]`` its RoPE table.
    """

    def __init__(self, attn: SparseMLAAttention, table: Tensor) -> None:
        self.weights = {name: value.double().cpu() for name, value in attn.state_dict().items()}
        self.geometry, self.ratio = attn.geometry, attn.geometry.compress_ratio
        self.table = table.double().cpu()

    def attend(self, x: Tensor, keys: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and lse of ``x [n, hidden]``; ``keys`` are the compressed rows, ``states [n, K]``
        the selected ones."""
        geometry, positions = self.geometry, torch.arange(len(x))
        window = self._rotate(self._norm(self._linear(x, "wkv"), "kv_norm"), positions)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & (distance < WINDOW)
        rows = window.bfloat16().double()
        if states is not None:
            chosen = torch.zeros(len(x), len(keys) + 1, dtype=torch.bool)
            chosen.scatter_(1, states.long() % (len(keys) + 1), True)  # -1: the last column
            rows, visible = torch.cat([rows, keys]), torch.cat([visible, chosen[:, :-1]], 1)
        q = self._linear(self._q_latent(x), "wq_b").unflatten(1, (-1, 512))
        q = self._rotate(q, positions)
        scores = torch.einsum("thd,sd->ths", q, rows) * 512**-0.5
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        lse = scores.logsumexp(2)
        out = scores.softmax(2) @ rows
        out = out * torch.sigmoid(lse - self.weights["attn_sink"])[:, :, None]
        grouped = self._rotate(out, positions, -1).flatten(1).unflatten(1, (geometry.o_groups, -1))
        wo_a = self.weights["wo_a.weight"].unflatten(0, (geometry.o_groups, -1))
        low_rank = torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1)
        return self._linear(low_rank, "wo_b"), lse

    def latents(self, x: Tensor) -> Tensor:
        """``[n // ratio, 512]`` latents of the closed groups, before RoPE."""
        x = x[: len(x) // self.ratio * self.ratio]
        kv = self._linear(x, "compressor.wkv").unflatten(0, (-1, self.ratio))
        if self.ratio == 2:
            score = self._linear(x, "compressor.wgate").unflatten(0, (-1, 2))
            kv = kv * score.softmax(1)
        return self._norm(kv.sum(1), "compressor.norm")

    def keys(self, latents: Tensor) -> Tensor:
        """Rows of the compressed cache, a bf16 record."""
        return self._rotate(latents, self._first_positions(latents)).bfloat16().double()

    def index_keys(self, latents: Tensor) -> Tensor:
        """Index keys as their fp8 record gives them back."""
        key = self._norm(self._linear(latents, "indexer.wk"), "indexer.k_norm")
        key = self._rotate(key, self._first_positions(latents))
        scale = 2 ** (key.abs().amax(1, keepdim=True) / 448).log2().ceil()
        return (key / scale).to(torch.float8_e4m3fn).double() * scale

    def scores(self, x: Tensor, index_keys: Tensor) -> Tensor:
        """``[n, states]`` index scores; -inf where a token may not look."""
        heads = self.geometry.index_num_heads
        positions = torch.arange(len(x))
        q = self._linear(self._q_latent(x), "indexer.wq_b").unflatten(1, (heads, 128))
        q = self._rotate(q, positions).bfloat16().double()
        weight = self._linear(x, "indexer.weights_proj") * (128 * heads) ** -0.5
        products = torch.einsum("thd,sd->ths", q, index_keys).relu()
        scores = torch.einsum("th,ths->ts", weight, products)
        num_visible = (positions + 1) // self.ratio
        return scores.masked_fill(torch.arange(len(index_keys)) >= num_visible[:, None], -torch.inf)

    def _q_latent(self, x: Tensor) -> Tensor:
        return self._norm(self._linear(x, "wq_a"), "q_norm")

    def _first_positions(self, latents: Tensor) -> Tensor:
        return torch.arange(len(latents)) * self.ratio

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rotate(self, x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """As complex numbers: the last 64 columns are 32 of them."""
        cos, sin = self.table[positions].split(32, 1)
        turn = torch.complex(cos, sign * sin)
        turn = turn[:, None] if x.dim() == 3 else turn
        tail = torch.view_as_complex(x[..., -64:].unflatten(-1, (32, 2)).contiguous())
        return torch.cat([x[..., :-64], torch.view_as_real(tail * turn).flatten(-2)], -1)


class Kept(NamedTuple):
    """What one token may look at, best first."""

    states: set[int]
    worst: float  # the lowest score kept
    next: float  # the best score that is left out, -inf if none is


def best(scores: Tensor, count: int) -> Kept:
    """The best of one token's scores, -inf aside."""
    order = scores.argsort(descending=True, stable=True)
    order = order[scores[order] > -torch.inf]
    kept, left = order[:count], order[count:]
    worst = float(scores[kept].min()) if len(kept) else torch.inf
    return Kept(set(kept.tolist()), worst, float(scores[left].max()) if len(left) else -torch.inf)
