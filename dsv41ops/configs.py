"""Launch configurations: pure functions of sizes, so that a graph's launches follow its shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# One program of the combine kernel holds all splits of a head at once.
MAX_SPLITS = 32
# Batch-invariant: rows per program. More would leave a small batch's SMs idle, fewer would cost a
# large batch its partial results.
INVARIANT_ROWS = 512
# In blocks of 64 rows, estimated: what a program spends before its first block and after its last,
# and what the combine kernel adds.
PROGRAM_COST = 2
COMBINE_COST = 1


@dataclass(frozen=True)
class DecodeProblem:
    """What a sparse MLA decode launch may depend on."""

    num_tokens: int
    num_heads: int
    window_width: int
    topk_width: int
    num_sms: int
    batch_invariant: bool = False
    capability: int = 9  # major


@dataclass(frozen=True)
class DecodeConfig:
    """One program: ``block_h`` heads of a token, a share of its blocks of ``block_n`` rows."""

    block_h: int
    block_n: int
    num_warps: int
    num_splits: int


def decode_config(problem: DecodeProblem) -> DecodeConfig:
    """Tile by the number of heads and the architecture; splits to fill the GPU, or by widths."""
    # 64 heads at a time need wgmma: their 64 x 512 accumulator and scores overflow Blackwell's
    # tensor memory, and registers and shared memory where there is neither.
    block_h = 64 if problem.capability == 9 and problem.num_heads > 16 else 16
    block_n, num_warps = 64, 8
    blocks = -(-problem.window_width // block_n) + -(-problem.topk_width // block_n)
    programs = problem.num_tokens * -(-problem.num_heads // block_h)
    if problem.batch_invariant:
        splits = _even(blocks, -(-blocks * block_n // INVARIANT_ROWS))
    else:
        splits = _fastest(blocks, programs, problem.num_sms)
    return DecodeConfig(block_h, block_n, num_warps, splits)


def _even(blocks: int, splits: int) -> int:
    """The fewest splits whose longest has no more blocks than with ``splits``."""
    splits = max(1, min(splits, blocks, MAX_SPLITS))
    return max(1, -(-blocks // -(-blocks // splits))) if blocks else 1


@lru_cache(maxsize=4096)
def _fastest(blocks: int, programs: int, num_sms: int) -> int:
    """The fewest splits of least cost, one program per SM at a time."""

    def cost(splits: int) -> int:
        waves = -(-programs * splits // num_sms)
        combine = COMBINE_COST if splits > 1 else 0
        return waves * (-(-blocks // splits) + PROGRAM_COST) + combine

    return min(range(1, max(1, min(blocks, MAX_SPLITS)) + 1), key=cost)
