"""Random sparse_mla_decode calls that carry their own float64 answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import dsv41ops
from tests.contract.inputs import rope_table
from tests.support import (
    HEAD_DIM,
    RECORDS,
    SCALE,
    assert_attention_close,
    assert_same_bits,
    dense_attention,
    random_cache,
    rotated,
)

# Window record, compressed record: alone, alike, and the pairs that releases and tests use.
PAIRS = [
    *((record, None) for record in RECORDS),
    ("fp8_ds_mla", "fp8_ds_mla"),
    ("mxfp8", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("bf16", "nvfp4"),
    ("fp8_ds_mla", "bf16"),
]


@dataclass(frozen=True)
class Part:
    """One cache and what each token selects from it."""

    cache: Tensor
    indices: Tensor
    lens: Tensor

    def select(self, tokens: Tensor) -> Part:
        return replace(self, indices=self.indices[tokens], lens=self.lens[tokens])


@dataclass(frozen=True)
class Rope:
    """By what the output is rotated back."""

    positions: Tensor
    cos_sin: Tensor

    def arguments(self) -> dict[str, Tensor]:
        return {"positions": self.positions, "cos_sin": self.cos_sin}


@dataclass(frozen=True)
class Call:
    """Arguments of one decode call, and the float64 answer to it."""

    q: Tensor
    parts: tuple[Part, ...]
    sink: Tensor | None = None
    scale: float = SCALE
    rope: Rope | None = None

    def run(self, **options: bool | str) -> tuple[Tensor, Tensor]:
        extra = self.parts[1] if len(self.parts) == 2 else None
        window = self.parts[0]
        return dsv41ops.sparse_mla_decode(
            self.q,
            window.cache,
            window.indices,
            window.lens,
            cache=extra and extra.cache,
            topk_indices=None if extra is None else extra.indices,
            topk_lens=None if extra is None else extra.lens,
            attn_sink=self.sink,
            softmax_scale=self.scale,
            **({} if self.rope is None else self.rope.arguments()),
            **options,
        )

    def exact(self) -> tuple[Tensor, Tensor]:
        parts = [(part.cache, part.indices, part.lens) for part in self.parts]
        out, lse = dense_attention(self.q, parts, sink=self.sink, scale=self.scale)
        if self.rope is not None:
            out = rotated(out, self.rope.positions, self.rope.cos_sin, back=True)
        return out, lse

    def check(self) -> None:
        """Right, contiguous, and with the caller's tensors untouched."""
        held = [self.q, *(t for p in self.parts for t in (p.cache, p.indices, p.lens))]
        held += [] if self.rope is None else self.rope.arguments().values()
        before = [tensor.clone() for tensor in held]
        expected = self.exact()
        for batch_invariant in (False, True):
            out, lse = self.run(batch_invariant=batch_invariant)
            assert_attention_close(out, lse, *expected)
            assert out.is_contiguous()
            assert lse.is_contiguous()
        for tensor, copy in zip(held, before, strict=True):
            assert_same_bits(tensor, copy)

    def select(self, tokens: list[int]) -> Call:
        rows = torch.tensor(tokens, device=self.q.device)
        parts = tuple(part.select(rows) for part in self.parts)
        rope = self.rope and replace(self.rope, positions=self.rope.positions[rows])
        return replace(self, q=self.q[rows], parts=parts, rope=rope)


def random_part(
    record: str,
    num_tokens: int,
    width: int,
    device: torch.device,
    *,
    num_pages: int = 6,
    page_size: int = 32,
    pad: int = 0,
) -> Part:
    """Indices with holes, repeats and past the cache; lengths below 0 and past the width."""
    cache = random_cache(record, num_pages, page_size, device, pad=pad)
    rows = num_pages * page_size
    indices = torch.randint(-rows // 4, rows + rows // 8, (num_tokens, width), dtype=torch.int32)
    lens = torch.randint(-2, width + 4, (num_tokens,), dtype=torch.int32)
    if num_tokens:
        lens[0] = width
        indices[0, 0] = 0
    return Part(cache, indices.to(device), lens.to(device))


def random_call(
    pair: tuple[str, str | None],
    num_tokens: int,
    heads: int,
    device: torch.device,
    *,
    window_width: int = 37,
    width: int = 65,
    sink: bool = True,
    rope: bool = False,
) -> Call:
    parts = [random_part(pair[0], num_tokens, window_width, device)]
    if pair[1] is not None:
        parts.append(random_part(pair[1], num_tokens, width, device, page_size=64, pad=2))
    q = torch.randn(num_tokens, heads, HEAD_DIM, device=device).bfloat16()
    logits = torch.randn(heads, device=device) * 2 + 3 if sink else None
    return Call(q, tuple(parts), logits, rope=random_rope(num_tokens, device) if rope else None)


def random_rope(
    num_tokens: int, device: torch.device, dtype: torch.dtype = torch.int64, rows: int = 50
) -> Rope:
    """Some positions below 0 or past the table."""
    positions = torch.randint(-rows // 8, rows + rows // 8, (num_tokens,), dtype=dtype)
    return Rope(positions.to(device), rope_table(rows, device))
