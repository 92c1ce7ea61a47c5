"""Launch configurations: pure functions of sizes, so that a graph's launches follow its shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import ClassVar

from dsv41ops.layouts import HEAD_DIM

# Of sparse_mla_decode on CUDA; where nothing was measured, `auto` takes the first that can. Each
# is a folder of kernels/ with a `supports` and a `sparse_mla_decode` module (see dispatch.py).
BACKENDS = ("cuda", "triton", "flash_mla")
AUTO = "auto"

# One program of the combine kernel holds all splits of a head at once.
MAX_SPLITS = 32
# Batch-invariant: rows per program. More would leave a small batch's SMs idle, fewer would cost a
# large batch its partial results.
INVARIANT_ROWS = 512
# In blocks of 64 rows, estimated: what a program spends before its first block and after its last,
# and what the combine kernel adds.
PROGRAM_COST = 2
COMBINE_COST = 1

# Of the CUDA C++ kernels, whose unit of work is some heads of one token.
# The mma kernel: tiles of 16 rows in the ring of a CTA that serves a unit by itself, per pair of
# records; as many as two CTAs of an SM leave room for.
RING_SLOTS = {
    "fp8_ds_mla+none": 8,
    "fp8_ds_mla+fp8_ds_mla": 8,
    "mxfp8+none": 9,
    "mxfp8+mxfp8": 9,
    "mxfp8+nvfp4": 9,
    "nvfp4+none": 14,
    "nvfp4+nvfp4": 14,
}
RING_TILE = 16
RANKS = (1, 2, 4, 8)
# CTAs of a cluster: how many clusters of that size an H200, which has 132 SMs, runs at once. Those
# of 8 and of 4 do not fill every GPC.
CLUSTER_UNITS = {8: 15, 4: 30, 2: 66}
MEASURED_SMS = 132
# Batch-invariant: tiles per rank. More would leave a small batch's SMs idle, fewer would cost a
# large batch the exchange of its partial results.
INVARIANT_TILES = 10
# Microseconds of a wave, measured there with 128 + 512 rows: of the mma kernel with one and with
# two CTAs per SM, and of the wgmma kernel.
WAVE_US = {
    "fp8_ds_mla": (30, 44, 54),
    "mxfp8": (25, 41, 36),
    "mxfp8+nvfp4": (28, 43, 50),
    "nvfp4": (26, 42, 44),
}
# The wgmma kernel's queries are f16, exact to 2^-28; a larger softmax scale could make more of
# smaller ones.
LARGE_SCALE = 1.0


@dataclass(frozen=True)
class DecodeProblem:
    """What a sparse MLA decode call's backend and launch may depend on; no tensor's values."""

    num_tokens: int
    num_heads: int
    window_width: int
    topk_width: int
    num_sms: int
    batch_invariant: bool = False
    capability: int = 9  # major
    window_record: str = "fp8_ds_mla"
    record: str | None = None  # of the compressed cache, if there is one to look into
    aligned: bool = True  # caches begin at, and their pages step by, multiples of 16 bytes
    page_stride: int = 0  # bytes, of the cache whose pages are farther apart
    cache_bytes: int = 0  # from the first to the last, of the longer cache
    empty_pool: bool = False  # a cache has no page
    softmax_scale: float = HEAD_DIM**-0.5

    @property
    def records(self) -> str:
        return f"{self.window_record}+{self.record or 'none'}"


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


def decode_variants(problems: Iterable[DecodeProblem]) -> set[DecodeConfig]:
    """The decode configurations of these problems; any number of splits above 1 is one variant."""
    configs = {decode_config(problem) for problem in problems}
    return {replace(config, num_splits=min(config.num_splits, 2)) for config in configs}


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


@dataclass(frozen=True)
class MmaConfig:
    """A cluster of ``ranks`` CTAs, which share a token's rows, for every ``heads`` heads of it."""

    source: ClassVar = "sparse_mla_decode.cu"

    m_tiles: int = 1  # of 16 heads
    score_warps: int = 4
    value_warps: int = 4
    slots: int = 8
    ctas_per_sm: int = 2
    ranks: int = 1

    @property
    def heads(self) -> int:
        return 16 * self.m_tiles

    @property
    def threads(self) -> int:
        return 32 * (self.score_warps + self.value_warps)

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """What the source is compiled with, besides the records."""
        return tuple((name.upper(), value) for name, value in asdict(self).items())

    def ctas(self, num_units: int, num_sms: int) -> int:
        """Of a launch for so many tokens times groups of heads."""
        return num_units * self.ranks


@dataclass(frozen=True)
class WgmmaConfig:
    """A CTA per SM, with a queue of units; what does not vary stands in the source."""

    source: ClassVar = "sparse_mla_decode_wgmma.cu"
    heads: ClassVar = 64
    threads: ClassVar = 512
    ctas_per_sm: ClassVar = 1
    ranks: ClassVar = 1
    macros: ClassVar[tuple[tuple[str, int], ...]] = ()

    def ctas(self, num_units: int, num_sms: int) -> int:
        return min(num_units, num_sms)


CudaConfig = MmaConfig | WgmmaConfig


def cuda_config(problem: DecodeProblem) -> CudaConfig:
    if _for_wgmma(problem):
        return WgmmaConfig()
    return mma_config(problem.records, _ranks(problem))


def mma_config(records: str, ranks: int) -> MmaConfig:
    """A rank of several has an SM to itself, and with it more warps and a longer ring."""
    if ranks == 1:
        return MmaConfig(slots=RING_SLOTS[records])
    return MmaConfig(score_warps=6, value_warps=8, slots=12, ctas_per_sm=1, ranks=ranks)


def cuda_variants(problems: Iterable[DecodeProblem]) -> set[CudaConfig]:
    """The CUDA configurations of these problems; each is compiled."""
    return {cuda_config(problem) for problem in problems}


def _for_wgmma(problem: DecodeProblem) -> bool:
    """Many tokens of many heads; not batch-invariant ones, as the two kernels' bits differ."""
    if problem.batch_invariant or abs(problem.softmax_scale) > LARGE_SCALE:
        return False
    units = _units(problem, MmaConfig().heads)
    if units <= CLUSTER_UNITS[2]:
        return False
    alone, shared, wgmma = WAVE_US.get(problem.records) or WAVE_US[problem.window_record]
    waves, rest = divmod(units, 2 * MEASURED_SMS)
    mma = waves * shared + (0 if rest == 0 else alone if rest <= MEASURED_SMS else shared)
    return ceil(_units(problem, WgmmaConfig.heads) / MEASURED_SMS) * wgmma < mma


def _units(problem: DecodeProblem, heads: int) -> float:
    """As many as would give every SM of the measured GPU as much to do."""
    units = problem.num_tokens * -(-problem.num_heads // heads)
    return units * MEASURED_SMS / problem.num_sms


def _ranks(problem: DecodeProblem) -> int:
    """As many as pay off, or by widths; none without a tile."""
    tiles = -(-problem.window_width // RING_TILE) + -(-problem.topk_width // RING_TILE)
    if problem.batch_invariant:
        most = tiles // INVARIANT_TILES
    else:
        units = _units(problem, MmaConfig().heads)
        most = max((ranks for ranks, up_to in CLUSTER_UNITS.items() if units <= up_to), default=1)
    return max(ranks for ranks in RANKS if ranks == 1 or ranks <= min(most, tiles))
