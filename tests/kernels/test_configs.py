"""Launch configurations are pure functions of sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dsv41ops.configs import (
    INVARIANT_ROWS,
    MAX_SPLITS,
    MMA_RANKS,
    RING_SLOTS,
    DecodeProblem,
    MmaConfig,
    WgmmaConfig,
    cuda_config,
    cuda_variants,
    decode_config,
    indexer_config,
    mma_config,
)

PROBLEM = DecodeProblem(num_tokens=1, num_heads=64, window_width=128, topk_width=512, num_sms=132)
TOKENS = [*range(1, 300), 512, 8192]


def blocks(problem: DecodeProblem) -> int:
    block_n = decode_config(problem).block_n
    return math.ceil(problem.window_width / block_n) + math.ceil(problem.topk_width / block_n)


@pytest.mark.parametrize(
    ("num_tokens", "splits"), [(1, 10), (8, 10), (16, 5), (64, 2), (128, 1), (512, 1), (8192, 1)]
)
def test_splits_fill_the_gpu(num_tokens: int, splits: int) -> None:
    """The release's widths on an H200."""
    assert decode_config(replace(PROBLEM, num_tokens=num_tokens)).num_splits == splits


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [1, 16, 17, 128])
@pytest.mark.parametrize("widths", [(0, 0), (1, 0), (128, 0), (0, 64), (128, 512), (192, 70000)])
def test_bounds(widths: tuple[int, int], heads: int, batch_invariant: bool) -> None:
    for num_tokens in TOKENS:
        problem = DecodeProblem(num_tokens, heads, *widths, 132, batch_invariant)
        splits = decode_config(problem).num_splits
        assert 1 <= splits <= max(1, min(MAX_SPLITS, blocks(problem)))


def test_no_split_is_empty_at_full_width() -> None:
    for num_tokens in TOKENS:
        problem = replace(PROBLEM, num_tokens=num_tokens, topk_width=2048)
        splits, total = decode_config(problem).num_splits, blocks(problem)
        shares = [total * (s + 1) // splits - total * s // splits for s in range(splits)]
        assert min(shares) >= 1
        assert max(shares) == math.ceil(total / splits)


@pytest.mark.parametrize("width", [0, 1, 64, 512, 2048])
def test_batch_invariant_ignores_the_batch(width: int) -> None:
    problem = replace(PROBLEM, topk_width=width, batch_invariant=True)
    configs = {
        decode_config(replace(problem, num_tokens=num_tokens, num_sms=num_sms))
        for num_tokens in TOKENS
        for num_sms in (78, 132)
    }
    assert len(configs) == 1
    (config,) = configs
    longest = math.ceil(blocks(problem) / config.num_splits)
    assert longest * config.block_n <= INVARIANT_ROWS or config.num_splits == MAX_SPLITS


@pytest.mark.parametrize("capability", [8, 9, 10, 12])
def test_tiles(capability: int) -> None:
    """Only sm_90's matrix instructions hold 64 heads at a time."""
    for heads in range(1, 129):
        config = decode_config(replace(PROBLEM, num_heads=heads, capability=capability))
        assert config.block_h == (64 if capability == 9 and heads > 16 else 16)


CUDA = replace(PROBLEM, window_record="mxfp8", record="nvfp4")


@pytest.mark.parametrize(
    ("num_tokens", "heads", "ranks"),
    [
        *((1, 64, 8), (3, 64, 8), (4, 64, 6), (7, 64, 4), (8, 64, 3), (9, 64, 3), (10, 64, 2)),
        *((16, 64, 2), (17, 64, 1), (66, 64, 1), (1, 128, 8), (2, 128, 6), (4, 128, 3)),
        *((15, 8, 8), (16, 16, 6), (18, 16, 4), (31, 1, 3), (40, 1, 2), (66, 1, 2), (67, 1, 1)),
        *((8, 32, 6), (9, 32, 4), (16, 32, 3), (33, 32, 2), (34, 32, 1)),
    ],
)
def test_a_cluster_fills_the_gpu(num_tokens: int, heads: int, ranks: int) -> None:
    """The release's widths on an H200, by the mma kernel: a scale that is not for the other."""
    problem = replace(CUDA, num_tokens=num_tokens, num_heads=heads, softmax_scale=2.0)
    assert cuda_config(problem) == mma_config(CUDA.records, ranks)
    half = replace(problem, num_sms=66)
    twice = replace(problem, num_tokens=2 * num_tokens)
    assert cuda_config(half) == cuda_config(twice)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "shape"),
    [
        *((7, 64, None), (8, 64, (32, 5)), (11, 64, (32, 5)), (12, 64, (32, 3))),
        *((20, 64, (32, 2)), (33, 64, (32, 2)), (34, 64, (32, 1)), (66, 64, (32, 1))),
        *((67, 64, (64, 1)), (8192, 64, (64, 1)), (66, 33, (32, 1)), (67, 33, (64, 1))),
        *((3, 128, None), (4, 128, (32, 5)), (16, 128, (32, 2)), (34, 128, (64, 2))),
        *((15, 32, None), (16, 32, (32, 5)), (66, 32, (32, 2)), (8192, 32, (32, 1))),
        *((17, 16, None), (18, 16, (16, 5)), (23, 16, None), (31, 16, (16, 3)), (39, 1, (16, 3))),
        *((66, 16, (16, 2)), (67, 1, (16, 1)), (8192, 16, (16, 1)), (66, 17, (32, 2))),
    ],
)
def test_many_tokens(num_tokens: int, heads: int, shape: tuple[int, int] | None) -> None:
    problem = replace(CUDA, num_tokens=num_tokens, num_heads=heads)
    config = cuda_config(problem)
    assert config == WgmmaConfig(*shape) if shape else isinstance(config, MmaConfig)
    assert cuda_config(replace(problem, num_tokens=2 * num_tokens, num_sms=264)) == config
    assert isinstance(cuda_config(replace(problem, batch_invariant=True)), MmaConfig)
    for scale in (-2.0, -0.05, 0.0, 1.5):
        assert isinstance(cuda_config(replace(problem, softmax_scale=scale)), MmaConfig)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [1, 16, 17, 128])
@pytest.mark.parametrize("widths", [(0, 0), (1, 0), (16, 16), (128, 0), (0, 64), (192, 70000)])
def test_no_rank_without_a_tile(widths: tuple[int, int], heads: int, batch_invariant: bool) -> None:
    for num_tokens in TOKENS:
        problem = DecodeProblem(num_tokens, heads, *widths, 132, batch_invariant)
        config = cuda_config(problem)
        rows = 64 if isinstance(config, WgmmaConfig) else 16
        splits = config.splits if isinstance(config, WgmmaConfig) else config.ranks
        assert splits <= max(1, sum(math.ceil(width / rows) for width in widths))
        assert heads > config.heads // 2 or config.heads == 16
        if not batch_invariant:
            assert (
                config.ranks == 1
                or config.ctas(num_tokens * math.ceil(heads / config.heads), 132) <= 132
            )


@pytest.mark.parametrize(("widths", "ranks"), [((128, 0), 1), ((128, 512), 4), ((192, 2048), 8)])
def test_batch_invariant_ranks_ignore_the_batch(widths: tuple[int, int], ranks: int) -> None:
    window_width, topk_width = widths
    problem = replace(CUDA, window_width=window_width, topk_width=topk_width, batch_invariant=True)
    configs = cuda_variants(
        replace(problem, num_tokens=num_tokens, num_heads=heads, num_sms=num_sms)
        for num_tokens in TOKENS
        for heads in (1, 128)
        for num_sms in (78, 132)
    )
    assert configs == {mma_config(CUDA.records, ranks)}


@pytest.mark.parametrize("num_heads", [16, 32, 64, 65, 128])
@pytest.mark.parametrize("num_sms", [66, 78, 132, 160])
@pytest.mark.parametrize("records", RING_SLOTS)
def test_cuda_variants_follow_the_records(records: str, num_heads: int, num_sms: int) -> None:
    """A scale too large for wgmma finds its kernel among the others' variants."""
    window, record = records.split("+")
    problem = replace(
        PROBLEM,
        num_heads=num_heads,
        num_sms=num_sms,
        window_record=window,
        record=None if record == "none" else record,
    )
    found = cuda_variants(replace(problem, num_tokens=T) for T in TOKENS)
    mma = {mma_config(records, ranks) for ranks in MMA_RANKS}
    heads = 16 if num_heads == 16 else 32
    few = {WgmmaConfig(heads, ranks) for ranks in (1, 2, 3, 5)}
    assert found <= {WgmmaConfig(64), WgmmaConfig(64, 2), *few, *mma}
    assert (WgmmaConfig(64, 2) in found) == (num_heads > 64 and "bf16" not in records)
    assert (WgmmaConfig(64) in found) == (num_heads > 32) or num_heads > 64
    assert few & found
    for scale in (1.0, 2.0):
        assert {
            cuda_config(replace(problem, num_tokens=T, softmax_scale=scale)) for T in TOKENS
        } <= found


@pytest.mark.parametrize("records", RING_SLOTS)
def test_ring_slots(records: str) -> None:
    for ranks in MMA_RANKS:
        config = mma_config(records, ranks)
        assert config.slots == RING_SLOTS[records][ranks > 1]
        assert config.ctas_per_sm == (2 if ranks == 1 else 1)
        assert config.slots >= 2 * config.score_warps


def test_macros_of_a_config() -> None:
    config = MmaConfig(score_warps=6, value_warps=8, slots=12, ctas_per_sm=1, ranks=4)
    assert (config.threads, config.ctas(5, 132)) == (448, 20)
    assert dict(config.macros) == {
        "SCORE_WARPS": 6,
        "VALUE_WARPS": 8,
        "SLOTS": 12,
        "CTAS_PER_SM": 1,
        "RANKS": 4,
    }
    queue, cluster = WgmmaConfig(64), WgmmaConfig(32, 3)
    assert queue.macros == (("HEADS", 64), ("RANKS", 1))
    assert cluster.macros == (("HEADS", 32), ("RANKS", 3))
    assert (queue.threads, cluster.threads, WgmmaConfig(16).threads) == (512, 512, 768)
    assert (queue.ctas(5, 132), queue.ctas(500, 132), cluster.ctas(39, 132)) == (5, 132, 117)
    assert (WgmmaConfig(64, 2).ctas(6, 132), WgmmaConfig(64, 2).ctas(500, 133)) == (6, 132)


@pytest.mark.parametrize("num_candidates", [0, 2048])
@pytest.mark.parametrize(("topk", "kept"), [(1, 0), (512, 0), (512, 2048), (2048, 2048)])
def test_indexer_memory_is_bounded(topk: int, kept: int, num_candidates: int) -> None:
    """64 MiB, whatever the tokens and the table; a share's list always has room for a chunk."""
    for num_tokens in TOKENS:
        for num_states in (0, 1, 4096, 2**16, 2**20, 2**31):
            block_size = 8 if kept or num_candidates else 0
            c = indexer_config(num_tokens, num_states, block_size, topk, kept, num_candidates, 132)
            blocks_of_chunk = c.chunk_rows // c.rows_per_block
            assert c.size >= topk + c.chunk_rows
            assert c.block_size >= kept + blocks_of_chunk
            assert c.merge_size > max(topk, kept) or c.splits == 1
            programs = c.tokens * c.splits
            groups = math.ceil(c.splits / c.lists_per_group)
            groups = c.tokens * (groups + (groups > 1))  # and all of them
            entries = 2 * (c.size + (c.block_size if kept else 0)) + 4 * c.chunk_rows
            entries += c.candidates if num_candidates else 0
            assert 4 * (programs * entries + groups * 2 * (topk + kept)) <= 2**26
            assert c.splits <= 256
            assert c.splits == 1 or programs <= 2 * 132
