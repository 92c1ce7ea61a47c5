"""Launch configurations: pure functions of sizes, so that a graph's launches follow its shapes."""

from __future__ import annotations

from dataclasses import dataclass

# One program of the combine kernel holds all splits of a head at once.
MAX_SPLITS = 32
# Batch-invariant: blocks of rows per program. More would leave a small batch's SMs idle, fewer
# would cost a large batch its partial results.
INVARIANT_BLOCKS = 8


@dataclass(frozen=True)
class DecodeProblem:
    """What a sparse MLA decode launch may depend on."""

    num_tokens: int
    num_heads: int
    window_width: int
    topk_width: int
    num_sms: int
    batch_invariant: bool = False


@dataclass(frozen=True)
class DecodeConfig:
    """One program: ``block_h`` heads of a token, a share of its blocks of ``block_n`` rows."""

    block_h: int
    block_n: int
    num_warps: int
    num_splits: int


@dataclass(frozen=True)
class _Tile:
    block_h: int
    block_n: int
    num_warps: int
    programs_per_sm: int  # as shared memory and registers of sm_90 allow


_TILES = (_Tile(16, 32, 4, 4), _Tile(32, 32, 4, 2), _Tile(64, 64, 8, 1))


def decode_config(problem: DecodeProblem) -> DecodeConfig:
    """Tile by the number of heads; splits to fill the GPU, or by widths alone."""
    tile = next((t for t in _TILES if problem.num_heads <= t.block_h), _TILES[-1])
    blocks = -(-problem.window_width // tile.block_n) + -(-problem.topk_width // tile.block_n)
    if problem.batch_invariant:
        splits = -(-blocks // INVARIANT_BLOCKS)
    else:
        programs = problem.num_tokens * -(-problem.num_heads // tile.block_h)
        splits = problem.num_sms * tile.programs_per_sm // max(1, programs)
    splits = max(1, min(splits, blocks, MAX_SPLITS))
    # As many as it takes at the same number of blocks in the longest.
    splits = max(1, -(-blocks // -(-blocks // splits))) if blocks else 1
    return DecodeConfig(tile.block_h, tile.block_n, tile.num_warps, splits)
