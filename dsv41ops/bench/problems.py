"""What is timed: the cases, and the least work that each of them has to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv41ops.configs import DecodeProblem
from dsv41ops.layouts import HEAD_DIM, record_named

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
ROW_OPS = ("kv_cache_insert", "kv_cache_gather")
RECORDS = ("fp8_ds_mla", "mxfp8", "nvfp4", "bf16")
REQUESTS = (1, 8, 64, 512)
ROWS = (1, 64, 512, 4096)
MERGE_TOKENS = (1, 64, 512)
MERGE_RANKS = 4
MERGE_HEADS = 64

BF16_BYTES = 2
INT32_BYTES = 4
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

    @property
    def detail(self) -> str:
        """What the case has besides its size."""
        if self.record is not None:
            return self.record
        if self.op == "merge_attention_states":
            return f"{MERGE_RANKS} ranks, H={MERGE_HEADS}"
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
        if self.record is not None:
            row_bytes = record_named(self.record).row_bytes
            return Work(0, self.size * (row_bytes + HEAD_DIM * BF16_BYTES + INT32_BYTES))
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
            _ops(("fp8_ds_mla",), (1, 512), (512,), (64,)),
        )
    return Plan(_decode(RECORD_PAIRS, HEADS, TOKENS), _ops(RECORDS, REQUESTS, ROWS, MERGE_TOKENS))


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
        *(OpCase("merge_attention_states", size) for size in merge),
    )
