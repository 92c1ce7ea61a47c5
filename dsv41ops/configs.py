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
# The mma kernel: tiles of 16 rows in the ring of a CTA that shares an SM with another, and of one
# that has it to itself, per pair of records: as many as there is room for, or use.
RING_TILE = 16
RING_SLOTS = {
    "fp8_ds_mla+none": (8, 12),
    "fp8_ds_mla+fp8_ds_mla": (8, 12),
    "mxfp8+none": (9, 12),
    "mxfp8+mxfp8": (9, 12),
    "mxfp8+nvfp4": (9, 12),
    "nvfp4+none": (14, 12),
    "nvfp4+nvfp4": (14, 12),
    "bf16+none": (5, 10),
    "bf16+bf16": (5, 10),
}
SCORE_WARP_SLOTS = 2  # of a ring, at least
MEASURED_SMS = 132
# CTAs of a cluster: how many clusters of that size an H200, which has 132 SMs, runs at once. Larger
# ones do not fill every GPC.
CLUSTER_UNITS = {8: 15, 6: 17, 5: 22, 4: 30, 3: 39, 2: 66}
# Batch-invariant: tiles per rank. More would leave a small batch's SMs idle, fewer would cost a
# large batch the exchange of its partial results.
INVARIANT_TILES = 10
# Microseconds of a wave, measured there with 128 + 512 rows. Of the mma kernel, with 16 heads per
# CTA, by CTAs per cluster; SHARED: two CTAs on every SM. Every unit had rows of its own, but
# of bf16 in clusters, where memory is what counts, two had the same, as with 32 heads.
SHARED, MMA_RANKS = 0, (1, 2, 3, 4, 6, 8)
WAVE_US: dict[str, dict[int, float]] = {
    "fp8_ds_mla": {8: 9.1, 6: 10.3, 4: 12.4, 3: 15.0, 2: 18.8, 1: 30.9, SHARED: 43.7},
    "mxfp8": {8: 9.2, 6: 10.6, 4: 12.0, 3: 15.0, 2: 19.6, 1: 27.7, SHARED: 41.5},
    "mxfp8+nvfp4": {8: 9.0, 6: 10.1, 4: 11.7, 3: 14.7, 2: 18.9, 1: 29.7, SHARED: 46.3},
    "nvfp4": {8: 8.9, 6: 9.9, 4: 11.3, 3: 14.3, 2: 18.2, 1: 26.9, SHARED: 42.9},
    "bf16": {8: 8.4, 6: 9.2, 4: 11.5, 3: 13.4, 2: 17.6, 1: 31.8, SHARED: 48.6},
}
# The wgmma kernel's rows at a time.
WGMMA_BLOCK = 64
# Its microseconds, by heads per CTA and CTAs per cluster, of the first wave.
WGMMA_US: dict[str, dict[tuple[int, int], float]] = {
    "fp8_ds_mla": {
        (16, 5): 11.4,
        (16, 3): 14.6,
        (16, 2): 16.4,
        (16, 1): 23.6,
        (32, 5): 13.6,
        (32, 3): 16.7,
        (32, 2): 18.3,
        (32, 1): 27.0,
        (64, 1): 34.1,
        (64, 2): 31.3,
    },
    "mxfp8": {
        (16, 5): 11.0,
        (16, 3): 13.9,
        (16, 2): 15.4,
        (16, 1): 22.1,
        (32, 5): 13.3,
        (32, 3): 16.0,
        (32, 2): 17.4,
        (32, 1): 25.4,
        (64, 1): 32.1,
        (64, 2): 30.5,
    },
    "mxfp8+nvfp4": {
        (16, 5): 10.6,
        (16, 3): 13.2,
        (16, 2): 15.0,
        (16, 1): 21.9,
        (32, 5): 13.2,
        (32, 3): 15.6,
        (32, 2): 17.1,
        (32, 1): 25.8,
        (64, 1): 35.8,
        (64, 2): 28.8,
    },
    "nvfp4": {
        (16, 5): 10.4,
        (16, 3): 13.1,
        (16, 2): 14.4,
        (16, 1): 20.7,
        (32, 5): 12.8,
        (32, 3): 15.2,
        (32, 2): 16.4,
        (32, 1): 23.8,
        (64, 1): 30.7,
        (64, 2): 27.9,
    },
    "bf16": {
        (16, 5): 11.5,
        (16, 3): 15.0,
        (16, 2): 18.2,
        (16, 1): 27.4,
        (32, 5): 14.1,
        (32, 3): 17.4,
        (32, 2): 19.9,
        (32, 1): 29.8,
        (64, 1): 33.8,
    },
}
# In first ones, of CTAs that fill the GPU: they begin before the last ones of the wave before end.
FURTHER_WAVE = 0.83
# Its queries are f16, exact to 2^-28; a larger softmax scale could make more of smaller ones. Peaks
# are found before the scale, which has to be above 0 therefore.
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
    rope: bool = False  # the output is rotated back to position 0

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
class _Variant:
    """What a CUDA source is compiled with, besides the records, is every field."""

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        return tuple((name.upper(), value) for name, value in asdict(self).items())


@dataclass(frozen=True)
class MmaConfig(_Variant):
    """A cluster of ``ranks`` CTAs, which share a token's rows, for every 16 heads of it."""

    source: ClassVar = "sparse_mla_decode.cu"
    heads: ClassVar = 16

    score_warps: int
    value_warps: int
    slots: int
    ctas_per_sm: int = 2
    ranks: int = 1

    @property
    def threads(self) -> int:
        return 32 * (self.score_warps + self.value_warps)

    def ctas(self, num_units: int, num_sms: int) -> int:
        """Of a launch for so many tokens times groups of heads."""
        return num_units * self.ranks


@dataclass(frozen=True)
class WgmmaConfig(_Variant):
    """A CTA per SM with a queue of units of ``heads`` heads.

    With 16 or 32 heads, ``ranks`` above 1 are a cluster for every unit, which splits its rows; with
    64 they are a cluster whose CTAs have all heads of a token and share its converted rows.
    """

    source: ClassVar = "sparse_mla_decode_wgmma.cu"
    ctas_per_sm: ClassVar = 1

    heads: int
    ranks: int = 1

    @property
    def threads(self) -> int:
        return 768 if self.heads == 16 else 512

    def ctas(self, num_units: int, num_sms: int) -> int:
        if self.splits > 1:
            return num_units * self.splits
        return min(num_units, num_sms // self.ranks * self.ranks)

    @property
    def splits(self) -> int:
        return self.ranks if self.heads <= 32 else 1


CudaConfig = MmaConfig | WgmmaConfig


def head_groups(num_heads: int, heads: int) -> int:
    """Units of work of a token whose CTAs have ``heads`` heads each."""
    return ceil(num_heads / heads)


def cuda_config(problem: DecodeProblem) -> CudaConfig:
    """The one whose waves take least."""
    if problem.batch_invariant:
        most = max(1, _tiles(problem, RING_TILE) // INVARIANT_TILES)
        return mma_config(problem.records, max(ranks for ranks in MMA_RANKS if ranks <= most))
    mma = _fastest_mma(problem)
    if not 0 < problem.softmax_scale <= LARGE_SCALE:
        return mma_config(problem.records, mma[1])
    wgmma = _fastest_wgmma(problem)
    return WgmmaConfig(*wgmma[1]) if wgmma[0] <= mma[0] else mma_config(problem.records, mma[1])


def mma_config(records: str, ranks: int) -> MmaConfig:
    """A rank of several has an SM to itself, and with it more warps and a longer ring."""
    shared, alone = RING_SLOTS[records]
    if ranks == 1:
        return MmaConfig(min(4, shared // SCORE_WARP_SLOTS), 4, shared)
    return MmaConfig(alone // SCORE_WARP_SLOTS, 8, alone, ctas_per_sm=1, ranks=ranks)


def cuda_variants(problems: Iterable[DecodeProblem]) -> set[CudaConfig]:
    """The CUDA configurations of these problems, whatever their scale; each is compiled."""
    variants: set[CudaConfig] = set()
    for problem in problems:
        config = cuda_config(problem)
        variants.add(config)
        if isinstance(config, WgmmaConfig):
            variants.add(mma_config(problem.records, _fastest_mma(problem)[1]))
    return variants


def _fastest_mma(problem: DecodeProblem) -> tuple[float, int]:
    """Microseconds and ranks."""
    wave_us, units = WAVE_US[_measured_records(problem)], _units(problem, MmaConfig.heads)
    tiles = _tiles(problem, RING_TILE)
    costs = {ranks: wave_us[ranks] for ranks in MMA_RANKS[1:] if _fit(units, ranks, tiles)}
    waves, rest = divmod(units, 2 * MEASURED_SMS)
    if rest > MEASURED_SMS:
        waves, rest = waves + 1, 0
    shared = wave_us[SHARED] * (1 + (waves - 1) * FURTHER_WAVE) if waves > 0 else 0
    costs[1] = shared + (wave_us[1] if rest > 0 else 0)
    return min((cost, ranks) for ranks, cost in costs.items())


def _fastest_wgmma(problem: DecodeProblem) -> tuple[float, tuple[int, int]]:
    """Microseconds, heads and ranks."""
    costs, blocks = {}, _tiles(problem, WGMMA_BLOCK)
    for shape, first in WGMMA_US[_measured_records(problem)].items():
        config = WgmmaConfig(*shape)
        units = _units(problem, config.heads)
        if config.splits > 1:
            serves, further = _fit(units, config.splits, blocks), 0
        else:
            serves = head_groups(problem.num_heads, config.heads) % config.ranks == 0
            further = ceil(units / MEASURED_SMS) - 1
        if serves and _suits(problem, config.heads):
            costs[shape] = first * (1 + further * FURTHER_WAVE)
    return min((cost, shape) for shape, cost in costs.items())


def _suits(problem: DecodeProblem, heads: int) -> bool:
    """A CTA for this many: no smaller one has them all, and those for 16 are for no more.

    Several of those would convert a token's rows several times.
    """
    return problem.num_heads <= 16 if heads == 16 else problem.num_heads > heads // 2


def _fit(units: float, ranks: int, tiles: int) -> bool:
    """All clusters run at once, and no rank is for nothing."""
    return units <= CLUSTER_UNITS[ranks] and ranks <= tiles


def _measured_records(problem: DecodeProblem) -> str:
    """What the tables of times know it by."""
    return problem.records if problem.records in WAVE_US else problem.window_record


def _units(problem: DecodeProblem, heads: int) -> float:
    """As many as would give every SM of the measured GPU as much to do."""
    units = problem.num_tokens * head_groups(problem.num_heads, heads)
    return units * MEASURED_SMS / problem.num_sms


def _tiles(problem: DecodeProblem, rows: int) -> int:
    return ceil(problem.window_width / rows) + ceil(problem.topk_width / rows)


# Of indexer_topk, estimated.
INDEXER_ROWS = 128  # of a tile
INDEXER_TILES = 8  # scored before the best are chosen
INDEXER_STAGES = 7  # three tiles: where a row lies is loaded before the row
INDEXER_WARPS = 8
INDEXER_PROGRAMS_PER_SM = 2
INDEXER_REGISTERS = 128  # of a thread, so that they fit
INDEXER_MIN_ROWS = 512  # that a program does not share with another
INDEXER_MAX_SPLITS = 256
INDEXER_MAX_TOKENS = 512  # at a time, which bounds the scratch memory
MERGE_ENTRIES = 8192  # that a program merges at a time
MERGE_ENTRIES_PER_WARP = 512


@dataclass(frozen=True)
class IndexerConfig:
    """``splits`` programs per token, ``tokens`` at a time; each scores tiles of ``rows`` states."""

    tokens: int
    splits: int
    rows: int
    rows_per_block: int
    tiles: int
    min_tiles: int
    size: int  # entries of a program's list of states
    block_size: int  # and of blocks
    candidates: int
    stages: int
    num_warps: int
    registers: int
    lists_per_group: int
    merge_size: int
    merge_lists: int
    merge_warps: int

    @property
    def chunk_rows(self) -> int:
        return self.rows * self.tiles


def indexer_config(
    num_tokens: int,
    num_states: int,
    candidate_block_size: int,
    topk: int,
    num_candidate_blocks: int,
    num_candidates: int,
    num_sms: int,
) -> IndexerConfig:
    """``num_states``: that a table (or the candidates) may name; no block size: no blocks."""
    rows = INDEXER_ROWS
    rows_per_block = _power_of_2(candidate_block_size)
    chunk = rows * INDEXER_TILES
    tokens = min(num_tokens, INDEXER_MAX_TOKENS)
    most = min(INDEXER_MAX_SPLITS, max(1, ceil(num_states / INDEXER_MIN_ROWS)))
    splits = max(1, min(INDEXER_PROGRAMS_PER_SM * num_sms // tokens, most))
    longest = max(topk, num_candidate_blocks)
    per_group = max(2, MERGE_ENTRIES // longest)
    if splits > per_group:
        per_group = max(per_group, ceil(splits**0.5))
    merge_size = min(MERGE_ENTRIES, _power_of_2(max(2, min(splits, per_group)) * longest))
    return IndexerConfig(
        tokens=tokens,
        splits=splits,
        rows=rows,
        rows_per_block=rows_per_block,
        tiles=INDEXER_TILES,
        min_tiles=max(1, INDEXER_MIN_ROWS // rows),
        size=_power_of_2(topk + chunk),
        block_size=_power_of_2(num_candidate_blocks + chunk // rows_per_block),
        candidates=_power_of_2(num_candidates),
        stages=INDEXER_STAGES,
        num_warps=INDEXER_WARPS,
        registers=INDEXER_REGISTERS,
        lists_per_group=per_group,
        merge_size=merge_size,
        merge_lists=_power_of_2(INDEXER_MAX_SPLITS),
        merge_warps=max(4, min(16, merge_size // MERGE_ENTRIES_PER_WARP)),
    )


def _power_of_2(number: int) -> int:
    """The least that is not less; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
