"""What is timed: the cases, and the least work that each of them has to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv41ops.configs import DecodeProblem
from dsv41ops.layouts import (
    HEAD_DIM,
    INDEX_HEAD_DIM,
    ROPE_DIM,
    index_record_named,
    record_named,
)

WINDOW = 128
TOPK = 512
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
HEADS = (8, 16, 32, 64, 128)
RECORD_PAIRS = (  # window cache, compressed cache
    ("fp8_ds_mla", "fp8_ds_mla"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "nvfp4"),
    ("nvfp4", "nvfp4"),
    ("bf16", "bf16"),
)

INDEX_OPS = (
    "token_to_request",
    "compressed_slot_mapping",
    "dcp_local_seq_lens",
    "sliding_window_indices",
    "topk_to_slots",
    "decode_metadata",
)
ROW_OPS = ("kv_cache_insert", "rope_kv_cache_insert", "kv_cache_gather")
RECORDS = ("fp8_ds_mla", "mxfp8", "nvfp4", "bf16")
INDEX_RECORDS = ("fp8", "mxfp4")
REQUESTS = (1, 8, 64, 512)
ROWS = (1, 64, 512, 4096)
MERGE_TOKENS = (1, 64, 512)
INDEX_HEADS = 32
INDEXER_TOKENS = (1, 8, 32, 128)
CONTEXTS = (2**12, 2**16, 2**19)
MERGE_RANKS = 4
MERGE_HEADS = 64
INDEX_PAGE = 64

BF16_BYTES = 2
INT32_BYTES = 4
INT64_BYTES = 8
F32_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes with every input read and every output written once."""

    flops: int
    num_bytes: int


@dataclass(frozen=True)
class DecodeCase:
    """``sparse_mla_decode`` of full rows: every window and top-k entry names a cached row."""

    window_record: str
    record: str
    num_heads: int
    num_tokens: int

    @property
    def pair(self) -> str:
        """Row bytes of the two caches, as ``528+288``."""
        window, compressed = record_named(self.window_record), record_named(self.record)
        return f"{window.row_bytes}+{compressed.row_bytes}"

    def problem(self, num_sms: int, capability: int) -> DecodeProblem:
        """As the choice of a backend sees it."""
        return DecodeProblem(
            self.num_tokens,
            self.num_heads,
            WINDOW,
            TOPK,
            num_sms,
            capability=capability,
            window_record=self.window_record,
            record=self.record,
        )

    @property
    def label(self) -> str:
        return f"sparse_mla_decode {self.pair} H={self.num_heads} T={self.num_tokens}"

    @property
    def work(self) -> Work:
        columns = WINDOW + TOPK
        heads = self.num_tokens * self.num_heads
        row_bytes = (
            WINDOW * record_named(self.window_record).row_bytes
            + TOPK * record_named(self.record).row_bytes
        )
        index_bytes = (columns + 2) * INT32_BYTES  # with the two lengths
        head_bytes = 2 * HEAD_DIM * BF16_BYTES + F32_BYTES  # q, out and lse
        return Work(
            flops=2 * 2 * HEAD_DIM * columns * heads,  # q · k and softmax · v
            num_bytes=self.num_tokens * (row_bytes + index_bytes)
            + heads * head_bytes
            + self.num_heads * F32_BYTES,  # the sink
        )


@dataclass(frozen=True)
class OpCase:
    """Any other op. ``size``: requests of an index op, each with one token; else tokens."""

    op: str
    size: int
    record: str | None = None
    context: int = 0  # states that each token of an indexer sees

    @property
    def detail(self) -> str:
        """What the case has besides its size."""
        if self.context:
            return f"{self.record} {self.context} states"
        if self.op == "merge_topk":
            return f"{MERGE_RANKS} ranks"
        if self.record is not None:
            return self.record
        if self.op == "merge_attention_states":
            return f"{MERGE_RANKS} ranks, H={MERGE_HEADS}"
        if self.op == "compress_kv":
            return "ratio 2"
        return ""

    @property
    def letter(self) -> str:
        return "R" if self.op in INDEX_OPS else "T"

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.op, self.detail, f"{self.letter}={self.size}")))

    @property
    def work(self) -> Work | None:
        """None for index ops: a few KiB, so that a launch is all they should cost."""
        if self.op == "indexer_topk":
            keys = self.context * index_record_named(self.record or "").row_bytes
            pages = -(-self.context // INDEX_PAGE) * INT32_BYTES
            queries = INDEX_HEADS * (INDEX_HEAD_DIM * BF16_BYTES + F32_BYTES)
            selected = TOPK * (INT32_BYTES + F32_BYTES)
            products = 2 * INDEX_HEADS * INDEX_HEAD_DIM * self.context
            return Work(self.size * products, self.size * (keys + pages + queries + selected))
        if self.op == "compress_kv":
            pairs = 3 * 2 * HEAD_DIM * F32_BYTES  # kv and score: given, and of the ring in and out
            integers = 3 * INT32_BYTES  # start, length, row of the ring
            weights = HEAD_DIM * F32_BYTES
            return Work(0, self.size * (pairs + HEAD_DIM * BF16_BYTES + integers) + weights)
        if self.op == "indexer_k_insert":
            key = index_record_named(self.record or "").row_bytes + INDEX_HEAD_DIM * F32_BYTES
            place = INT32_BYTES + INT64_BYTES + ROPE_DIM * F32_BYTES
            return Work(0, self.size * (key + place) + INDEX_HEAD_DIM * F32_BYTES)
        if self.record is not None:
            row_bytes = record_named(self.record).row_bytes + HEAD_DIM * BF16_BYTES + INT32_BYTES
            if self.op == "rope_kv_cache_insert":
                row_bytes += INT64_BYTES + ROPE_DIM * F32_BYTES
            return Work(0, self.size * row_bytes)
        if self.op == "merge_topk":
            lists = self.size * (MERGE_RANKS + 1) * TOPK
            return Work(0, lists * (INT32_BYTES + F32_BYTES))
        if self.op == "merge_attention_states":
            rows = self.size * MERGE_HEADS * (MERGE_RANKS + 1)
            sink_bytes = MERGE_HEADS * F32_BYTES
            return Work(0, rows * (HEAD_DIM * BF16_BYTES + F32_BYTES) + sink_bytes)
        return None


@dataclass(frozen=True)
class Plan:
    """Cases of one run."""

    decode: tuple[DecodeCase, ...]
    ops: tuple[OpCase, ...]

    def checked(self) -> list[DecodeCase | OpCase]:
        """The smallest and the largest case of each family."""
        families: dict[object, list[DecodeCase | OpCase]] = {}
        for decode in self.decode:
            family = (decode.window_record, decode.record, decode.num_heads)
            families.setdefault(family, []).append(decode)
        for op in self.ops:
            families.setdefault((op.op, op.record), []).append(op)
        ends = [dict.fromkeys((cases[0], cases[-1])) for cases in families.values()]
        return [case for pair in ends for case in pair]


def plan(quick: bool) -> Plan:
    """All cases, sizes ascending within a family; ``quick``: a few of each kind."""
    if quick:
        return Plan(
            _decode((RECORD_PAIRS[0], RECORD_PAIRS[2]), (16, 64), (1, 16, 128)),
            (
                *_ops(("fp8_ds_mla",), (1, 512), (512,), (64,)),
                *_indexer(("fp8",), (1, 128), CONTEXTS[:2]),
            ),
        )
    return Plan(
        _decode(RECORD_PAIRS, HEADS, TOKENS),
        (
            *_ops(RECORDS, REQUESTS, ROWS, MERGE_TOKENS),
            *_indexer(INDEX_RECORDS, INDEXER_TOKENS, CONTEXTS),
        ),
    )


def _decode(
    pairs: Sequence[tuple[str, str]], heads: Sequence[int], tokens: Sequence[int]
) -> tuple[DecodeCase, ...]:
    return tuple(DecodeCase(*pair, H, T) for pair in pairs for H in heads for T in tokens)


def _ops(
    records: Sequence[str], requests: Sequence[int], rows: Sequence[int], merge: Sequence[int]
) -> tuple[OpCase, ...]:
    return (
        *(OpCase(op, size) for op in INDEX_OPS for size in requests),
        *(OpCase(op, size, record) for op in ROW_OPS for record in records for size in rows),
        *(OpCase("compress_kv", size) for size in rows),
        *(OpCase("indexer_k_insert", size, record) for record in INDEX_RECORDS for size in rows),
        *(OpCase("merge_attention_states", size) for size in merge),
        *(OpCase("merge_topk", size) for size in merge),
    )


def _indexer(
    records: Sequence[str], tokens: Sequence[int], contexts: Sequence[int]
) -> tuple[OpCase, ...]:
    return tuple(
        OpCase("indexer_topk", T, record, context)
        for record in records
        for T in tokens
        for context in contexts
    )
