"""Wrong arguments: one ValueError that names the argument, wherever the call comes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dsv41ops.configs import BACKENDS
from tests.contract.inputs import (
    OPS,
    Arguments,
    argument_sets,
    as_meta,
    overload,
    public,
    written,
)

CPU = torch.device("cpu")
Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Row:
    """One wrong argument: what is done to it, and what the message says after its name."""

    argument: str
    change: Change
    says: str
    label: str


def spread(tensor: Tensor) -> Tensor:
    """The same values at stride 2 in the last dimension."""
    return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]


def dtype(argument: str, wrong: torch.dtype, right: str) -> Row:
    says = f": expected {right}, got {wrong}"
    return Row(argument, lambda t: t.to(wrong), says, f"{wrong}".removeprefix("torch."))


def rank(argument: str, dims: int) -> Row:
    says = f": expected {dims} dimensions, got shape (1, "
    return Row(argument, lambda t: t.unsqueeze(0), says, "extra_dimension")


def stride(argument: str) -> Row:
    return Row(argument, spread, ": expected stride 1 in the last dimension, got ", "stride2")


def device(argument: str) -> Row:
    return Row(argument, lambda t: t.to("meta"), ": expected a tensor on ", "other_device")


def shorter(argument: str, says: str, dim: int = 0) -> Row:
    def cut(tensor: Tensor) -> Tensor:
        return tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()

    return Row(argument, cut, says, f"short_dimension{dim}")


def value(argument: str, wrong: Any, says: str) -> Row:
    return Row(argument, lambda _: wrong, says, f"{wrong}")


def vector(argument: str, *, anchor: bool = False, right: str = "torch.int32") -> list[Row]:
    """What is wrong for any 1-D index tensor; an anchor's device is by definition right."""
    rows = [
        dtype(argument, torch.float32, right),
        dtype(argument, torch.int16, right),
        rank(argument, 1),
        stride(argument),
    ]
    return rows if anchor else [*rows, device(argument)]


def matrix(argument: str, right: str = "torch.int32") -> list[Row]:
    return [
        dtype(argument, torch.float32, right),
        dtype(argument, torch.int16, right),
        rank(argument, 2),
        stride(argument),
        device(argument),
    ]


def pool(argument: str, *, anchor: bool = False) -> list[Row]:
    """What is wrong for a cache; the last dimension and the dtype name the record together."""
    no_record = ": expected a last dimension of 584 torch.uint8 (fp8_ds_mla), 528 "
    return [
        Row(argument, lambda t: t.to(torch.int8), no_record, "int8"),
        Row(argument, lambda t: t[..., :-1], no_record, "narrow"),
        *pages(argument, anchor=anchor),
    ]


def index_pool(argument: str, *, anchor: bool = False) -> list[Row]:
    """The same of a cache of index keys."""
    no_record = ": expected a last dimension of 132 (fp8) or 68 (mxfp4), got shape (6, 8, "
    return [
        dtype(argument, torch.int8, "torch.uint8"),
        Row(argument, lambda t: t[..., :-1], no_record, "narrow"),
        *pages(argument, anchor=anchor),
    ]


def pages(argument: str, *, anchor: bool) -> list[Row]:
    def overlapping(tensor: Tensor) -> Tensor:
        return tensor.as_strided(tensor.shape, (tensor.shape[2], tensor.shape[2], 1))

    rows = [
        rank(argument, 3),
        stride(argument),
        Row(argument, lambda t: t[:, ::2], ": expected rows ", "rows_apart"),
        Row(argument, lambda t: t[:, :0], "'s page size: expected at least 1, got 0", "no_rows"),
        Row(argument, overlapping, ": expected pages at least ", "pages_overlap"),
        Row(argument, lambda t: t[:1].expand(t.shape), ": expected pages at least ", "expanded"),
    ]
    return rows if anchor else [*rows, device(argument)]


def norm_weight(says: str, short: int) -> list[Row]:
    return [
        *vector("norm_weight", right=FLOATS)[1:],
        shorter("norm_weight", f"{says}0, got shape ({short},)"),
    ]


def rope(short_positions: str) -> list[Row]:
    return [
        *vector("positions", right=SLOTS),
        shorter("positions", short_positions),
        *matrix("cos_sin", "torch.float32")[1:],
        dtype("cos_sin", torch.bfloat16, "torch.float32"),
        shorter("cos_sin", ": expected cosines and sines = 64 in dimension 1, got ", dim=1),
    ]


BATCH = [
    *vector("query_start_loc", anchor=True),
    Row("query_start_loc", lambda t: t[:0], "'s length: expected at least 1, got 0", "empty"),
    *vector("seq_lens"),
    shorter("seq_lens", ": expected len(query_start_loc) - 1 = 5 in dimension 0, got shape (4,)"),
    *matrix("block_table"),
]
NUM_TOKENS = [value("num_tokens", -1, ": expected at least 0, got -1")]
DCP = [
    value("dcp_world_size", 0, ": expected at least 1, got 0"),
    value("dcp_rank", 2, ": expected 0 <= rank < dcp_world_size = 2, got 2"),
    value("dcp_rank", -1, ": expected 0 <= rank < dcp_world_size = 2, got -1"),
    value("cp_interleave", 0, ": expected at least 1, got 0"),
]
STATES = [
    value("states_per_page", 0, ": expected at least 1, got 0"),
    value("states_per_page", 7, ": expected a multiple of cp_interleave = 2 under DCP, got 7"),
    value("compress_ratio", 0, ": expected at least 1, got 0"),
    value("compress_ratio", -2, ": expected at least 1, got -2"),
    *DCP,
]
HEAD_DIM_ROWS = ": expected head_dim = 512 in dimension "
SLOTS = "torch.int32 or torch.int64"
FLOATS = "torch.float32 or torch.bfloat16"
RING_CAPACITY = ": expected a capacity (dimension 1) of a power of two, 2 or more, got shape "
ROWS_OR_NONE = ": expected at least 17 rows or none, got shape (16"
INDEX_OUT = [
    *matrix("out"),
    shorter("out", ": expected at least 17 rows, got shape (16, "),
    shorter("out", ": expected index width = ", dim=1),
    *vector("lens"),
    shorter("lens", ": expected rows of out = 17 in dimension 0, got shape (16,)"),
]

# Per op: an argument set that gives every optional argument, and everything wrong with each.
TABLE: dict[str, tuple[str, list[Row]]] = {
    "token_to_request": (
        "T17",
        [
            *vector("query_start_loc", anchor=True),
            Row("query_start_loc", lambda t: t[:0], "'s length: expected at least 1", "empty"),
            *NUM_TOKENS,
        ],
    ),
    "compressed_slot_mapping": (
        "dcp_slot_mapping",
        [
            *BATCH,
            *NUM_TOKENS,
            *STATES,
            *vector("slot_mapping", right=SLOTS),
            Row(
                "slot_mapping",
                lambda t: t[:16],
                ": expected at least 17 rows, got shape (16,)",
                "shorter_than_num_tokens",
            ),
        ],
    ),
    "dcp_local_seq_lens": (
        "interleave4",
        [
            *vector("seq_lens", anchor=True),
            value("compress_ratio", 0, ": expected at least 1, got 0"),
            *DCP,
        ],
    ),
    "sliding_window_indices": (
        "replay_start",
        [
            *BATCH,
            *NUM_TOKENS,
            value("page_size", 0, ": expected at least 1, got 0"),
            value("window", 0, ": expected at least 1, got 0"),
            value("width", 127, ": expected at least window = 128, or None, got 127"),
            Row("width", lambda _: None, ": expected window plus the draft block", "not_causal"),
            *vector("replay_start"),
            shorter("replay_start", ": expected len(seq_lens) = 5 in dimension 0, got shape (4,)"),
        ],
    ),
    "topk_to_slots": ("dcp", [*BATCH, *STATES, *matrix("topk_indices", SLOTS)]),
    "decode_metadata": (
        "all",
        [
            *[row for row in BATCH if row.argument != "block_table"],
            *NUM_TOKENS,
            *matrix("swa_block_table"),
            value("swa_page_size", 0, ": expected at least 1 with swa_block_table, got 0"),
            value("swa_page_size", None, ": expected at least 1 with swa_block_table, got None"),
            *matrix("block_table_c1a"),
            *matrix("block_table_c2a"),
            value("block_size", 0, ": expected at least 1 with block_table_c1a, got 0"),
            value("block_size", None, ": expected at least 1 with block_table_c1a, got None"),
            value("block_size", 6, ": expected a multiple of 4 tokens, got 6"),
            value("window", 0, ": expected at least 1, got 0"),
            value("width", 127, ": expected at least window = 128, or None, got 127"),
            Row("width", lambda _: None, ": expected window plus the draft block", "not_causal"),
            *vector("replay_start"),
            shorter("replay_start", ": expected len(seq_lens) = 5 in dimension 0, got shape (4,)"),
            *vector("slot_mapping", right=SLOTS),
            Row(
                "slot_mapping",
                lambda t: t[:16],
                ": expected at least 17 rows, got shape (16,)",
                "shorter_than_num_tokens",
            ),
            *DCP[:3],
            value("cp_interleave_c1a", 0, ": expected at least 1, got 0"),
            value("cp_interleave_c2a", 0, ": expected at least 1, got 0"),
        ],
    ),
    "kv_cache_insert": (
        "mxfp8_T17",
        [
            dtype("kv", torch.float32, "torch.bfloat16"),
            rank("kv", 2),
            stride("kv"),
            device("kv"),
            shorter("kv", HEAD_DIM_ROWS + "1, got shape (17, 511)", dim=1),
            *vector("slot_mapping", right=SLOTS),
            shorter("slot_mapping", ": expected rows of kv = 17 in dimension 0, got shape (16,)"),
            *pool("cache", anchor=True),
        ],
    ),
    "compress_kv": (
        "all",
        [
            *[row for row in BATCH if row.argument != "block_table"],
            *matrix("kv", "torch.float32")[1:],
            dtype("kv", torch.bfloat16, "torch.float32"),
            shorter("kv", HEAD_DIM_ROWS + "1, got shape (17, 511)", dim=1),
            *matrix("score", "torch.float32")[1:],
            dtype("score", torch.bfloat16, "torch.float32"),
            shorter("score", ": expected rows of kv = 17 in dimension 0, got shape (16, 512)"),
            shorter("score", HEAD_DIM_ROWS + "1, got shape (17, 511)", dim=1),
            value("score", None, ": expected a tensor with compress_ratio = 2, got None"),
            *norm_weight(HEAD_DIM_ROWS, 511),
            *vector("ring_slots", right=SLOTS),
            shorter("ring_slots", ": expected len(seq_lens) = 5 in dimension 0, got shape (4,)"),
            value("ring_slots", None, ": expected a tensor with compress_ratio = 2, got None"),
            dtype("ring", torch.bfloat16, "torch.float32"),
            rank("ring", 4),
            stride("ring"),
            device("ring"),
            shorter("ring", ": expected kv and score = 2 in dimension 2, got shape (5, ", dim=2),
            shorter("ring", HEAD_DIM_ROWS + "3, got shape (5, 4, 2, 511)", dim=3),
            shorter("ring", RING_CAPACITY + "(5, 3, 2, 512)", dim=1),
            Row("ring", lambda t: t[:, :1], RING_CAPACITY + "(5, 1, 2, 512)", "capacity1"),
            Row("ring", lambda t: t[:, ::2], ": expected the last three dimensions ", "apart"),
            Row("ring", lambda t: t[:1].expand(t.shape), ": expected rows at least ", "expanded"),
            value("ring", None, ": expected a tensor with compress_ratio = 2, got None"),
            value("compress_ratio", 0, ": expected 1 or 2, got 0"),
            value("compress_ratio", 3, ": expected 1 or 2, got 3"),
            value("out_dtype", torch.float16, ": expected torch.float32, torch.bfloat16 or None, "),
        ],
    ),
    "indexer_k_insert": (
        "fp8_T17",
        [
            *matrix("k", FLOATS)[1:],
            dtype("k", torch.float16, FLOATS),
            shorter("k", ": expected index_head_dim = 128 in dimension 1, got ", dim=1),
            *norm_weight(": expected index_head_dim = 128 in dimension ", 127),
            *vector("positions", right=SLOTS),
            shorter("positions", ": expected rows of k = 17 in dimension 0, got shape (16,)"),
            *matrix("cos_sin", "torch.float32")[1:],
            shorter("cos_sin", ": expected cosines and sines = 64 in dimension 1, got ", dim=1),
            *vector("slot_mapping", right=SLOTS),
            shorter("slot_mapping", ": expected rows of k = 17 in dimension 0, got shape (16,)"),
            *index_pool("cache", anchor=True),
            value("compress_ratio", 0, ": expected at least 1, got 0"),
        ],
    ),
    "indexer_topk": (
        "all",
        [
            *BATCH,
            dtype("q", torch.float32, "torch.bfloat16"),
            rank("q", 3),
            stride("q"),
            device("q"),
            shorter("q", ": expected index_head_dim = 128 in dimension 2, got ", dim=2),
            Row("q", lambda t: t[:, :0], "'s number of heads: expected 1 to 64, got 0", "no_heads"),
            Row(
                "q",
                lambda t: t.repeat(1, 22, 1),
                "'s number of heads: expected 1 to 64, got 66",
                "66_heads",
            ),
            *matrix("weights", "torch.float32")[1:],
            dtype("weights", torch.bfloat16, "torch.float32"),
            shorter("weights", ": expected tokens = 17 in dimension 0, got shape (16, 3)"),
            shorter("weights", ": expected heads = 3 in dimension 1, got shape (17, 2)", dim=1),
            *index_pool("cache"),
            Row(
                "cache",
                lambda t: t[:, :7],
                ": expected pages of a multiple of cp_interleave = 2 rows under DCP, got 7",
                "odd_pages",
            ),
            value("topk", 0, ": expected 1 to 2048, got 0"),
            value("topk", 2049, ": expected 1 to 2048, got 2049"),
            value("compress_ratio", 0, ": expected at least 1, got 0"),
            *matrix("candidate_blocks"),
            dtype("candidate_blocks", torch.int64, "torch.int32"),
            shorter("candidate_blocks", ": expected tokens = 17 in dimension 0, got shape (16, 9)"),
            Row(
                "candidate_blocks",
                lambda t: t.repeat(1, 230),
                "' width: expected 0 to 2048, got 2070",
                "wide",
            ),
            value("num_candidate_blocks", -1, ": expected 0 to 2048, got -1"),
            value("num_candidate_blocks", 2049, ": expected 0 to 2048, got 2049"),
            value("candidate_block_size", 0, ": expected 1 to 128, got 0"),
            value("candidate_block_size", 129, ": expected 1 to 128, got 129"),
            *DCP,
        ],
    ),
    "merge_topk": (
        "T17",
        [
            dtype("indices", torch.int64, "torch.int32"),
            rank("indices", 3),
            stride("indices"),
            dtype("scores", torch.bfloat16, "torch.float32"),
            rank("scores", 3),
            stride("scores"),
            device("scores"),
            shorter("scores", ": expected ranks = 3 in dimension 0, got shape (2, 17, 6)"),
            shorter("scores", ": expected tokens = 17 in dimension 1, got shape (3, 16, 6)", dim=1),
            shorter("scores", ": expected columns = 6 in dimension 2, got shape (3, 17, 5)", dim=2),
            value("topk", 0, ": expected 1 to 2048, got 0"),
            value("topk", 2049, ": expected 1 to 2048, got 2049"),
        ],
    ),
    "rope_kv_cache_insert": (
        "ratio2",
        [
            dtype("kv", torch.float16, "torch.bfloat16 or torch.float32"),
            rank("kv", 2),
            stride("kv"),
            device("kv"),
            shorter("kv", HEAD_DIM_ROWS + "1, got shape (17, 511)", dim=1),
            *rope(": expected rows of kv = 17 in dimension 0, got shape (16,)"),
            *vector("slot_mapping", right=SLOTS),
            shorter("slot_mapping", ": expected rows of kv = 17 in dimension 0, got shape (16,)"),
            *pool("cache", anchor=True),
            value("compress_ratio", 0, ": expected at least 1, got 0"),
        ],
    ),
    "kv_cache_gather": (
        "nvfp4_N17",
        [*pool("cache", anchor=True), *vector("slots", right=SLOTS)],
    ),
    "sparse_mla_decode": (
        "all",
        [
            dtype("q", torch.float16, "torch.bfloat16"),
            rank("q", 3),
            stride("q"),
            shorter("q", HEAD_DIM_ROWS + "2, got shape (17, 2, 511)", dim=2),
            Row(
                "q",
                lambda t: t[:, :0],
                "'s number of heads: expected at least 1, got 0",
                "no_heads",
            ),
            Row(
                "q",
                lambda t: t.repeat(1, 65, 1),
                ": expected 1 to 128 heads, got shape (17, 130",
                "130_heads",
            ),
            *pool("swa_cache"),
            *matrix("swa_indices"),
            shorter("swa_indices", ": expected tokens = 17 in dimension 0, got shape (16, 12)"),
            *vector("swa_lens"),
            dtype("swa_lens", torch.int64, "torch.int32"),
            shorter("swa_lens", ": expected tokens = 17 in dimension 0, got shape (16,)"),
            *pool("cache"),
            value("cache", None, ": expected cache, topk_indices and topk_lens together"),
            *matrix("topk_indices"),
            dtype("topk_indices", torch.int64, "torch.int32"),
            shorter("topk_indices", ": expected tokens = 17 in dimension 0, got shape (16, 6)"),
            value("topk_indices", None, ": expected cache, topk_indices and topk_lens together"),
            *vector("topk_lens"),
            shorter("topk_lens", ": expected tokens = 17 in dimension 0, got shape (16,)"),
            value("topk_lens", None, ": expected cache, topk_indices and topk_lens together"),
            *vector("attn_sink", right="torch.float32")[1:],
            dtype("attn_sink", torch.bfloat16, "torch.float32"),
            shorter("attn_sink", ": expected heads = 2 in dimension 0, got shape (1,)"),
            *rope(": expected tokens = 17 in dimension 0, got shape (16,)"),
            value("positions", None, ": expected positions and cos_sin together, or neither, got"),
            value("cos_sin", None, ": expected positions and cos_sin together, or neither, got"),
            value("backend", "fast", f": expected one of auto, {', '.join(BACKENDS)}, got 'fast'"),
        ],
    ),
    "merge_attention_states": (
        "sink",
        [
            dtype("outs", torch.float16, "torch.bfloat16 or torch.float32"),
            rank("outs", 4),
            stride("outs"),
            shorter("outs", HEAD_DIM_ROWS + "3, got shape (3, 17, 2, 511)", dim=3),
            dtype("lses", torch.bfloat16, "torch.float32"),
            rank("lses", 3),
            stride("lses"),
            device("lses"),
            shorter("lses", ": expected ranks = 3 in dimension 0, got shape (2, 17, 2)"),
            shorter("lses", ": expected tokens = 17 in dimension 1, got shape (3, 16, 2)", dim=1),
            shorter("lses", ": expected heads = 2 in dimension 2, got shape (3, 17, 1)", dim=2),
            *vector("attn_sink", right="torch.float32")[1:],
            shorter("attn_sink", ": expected heads = 2 in dimension 0, got shape (1,)"),
        ],
    ),
}

# What only a twin can get wrong.
TWINS: dict[str, list[Row]] = {
    "compressed_slot_mapping_out": [
        dtype("out", torch.int32, "torch.int64"),
        rank("out", 1),
        stride("out"),
        device("out"),
        shorter("out", ": expected at least 17 rows, got shape (16,)"),
    ],
    "sliding_window_indices_out": INDEX_OUT,
    "topk_to_slots_out": INDEX_OUT,
    "decode_metadata_out": [
        *matrix("swa_indices"),
        shorter("swa_indices", ROWS_OR_NONE),
        shorter("swa_indices", ": expected index width = 128 in dimension 1, got ", dim=1),
        *vector("swa_lens"),
        shorter("swa_lens", ": expected rows of swa_indices = 17 in dimension 0, got shape (16,)"),
        *(
            row
            for name, right in (
                ("req_id_per_token", "torch.int32"),
                ("positions", "torch.int64"),
                ("swa_slot_mapping", "torch.int64"),
                ("compressed_slot_mapping_c1a", "torch.int64"),
                ("compressed_slot_mapping_c2a", "torch.int64"),
            )
            for row in (*vector(name, right=right), shorter(name, ROWS_OR_NONE))
        ),
        *vector("dcp_local_seq_lens_c1a"),
        shorter("dcp_local_seq_lens_c1a", ": expected at least 5 rows or none, got shape (4,)"),
        *vector("dcp_local_seq_lens_c2a"),
        shorter("dcp_local_seq_lens_c2a", ": expected at least 5 rows or none, got shape (4,)"),
    ],
    "sparse_mla_decode_out": [
        dtype("out", torch.float32, "torch.bfloat16"),
        rank("out", 3),
        stride("out"),
        device("out"),
        shorter("out", ": expected at least 17 rows, got shape (16, 2, 512)"),
        shorter("out", ": expected heads = 2 in dimension 1, got shape (17, 1, 512)", dim=1),
        shorter("out", HEAD_DIM_ROWS + "2, got shape (17, 2, 511)", dim=2),
        dtype("lse", torch.bfloat16, "torch.float32"),
        rank("lse", 2),
        stride("lse"),
        device("lse"),
        shorter("lse", ": expected at least 17 rows, got shape (16, 2)"),
        shorter("lse", ": expected heads = 2 in dimension 1, got shape (17, 1)", dim=1),
    ],
}


def base_set(op: str) -> str:
    return TABLE[op.removesuffix("_out")][0]


def own_rows(op: str) -> list[Row]:
    return TWINS[op] if op in TWINS else TABLE[op][1]


ROWS = [
    pytest.param(op, row, id=f"{op}-{row.argument}-{row.label}")
    for op in OPS
    for row in own_rows(op)
]
ONE_ROW_EACH = [
    pytest.param(op, row, id=f"{op}-{argument}")
    for op in OPS
    for argument, row in {row.argument: row for row in own_rows(op)}.items()
]


def wrong(op: str, row: Row, on: torch.device) -> Arguments:
    """Valid arguments but for the row's one."""
    arguments = argument_sets(op)[base_set(op)](on)
    if row.label == "not_causal":
        arguments["causal"] = False
    arguments[row.argument] = row.change(arguments.get(row.argument))
    return arguments


def message(call: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ValueError, match=r": expected .*, got ") as caught:
        call(**arguments)
    assert type(caught.value) is ValueError
    return str(caught.value)


@pytest.mark.parametrize(("op", "row"), ROWS)
def test_one_error_everywhere(op: str, row: Row, device: torch.device) -> None:
    arguments = wrong(op, row, device)
    tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
    rest = {k: v for k, v in arguments.items() if k not in tensors}

    eager = message(overload(op), **arguments)
    assert eager.startswith(f"{row.argument}{row.says}")
    assert message(public(op), **arguments) == eager

    with FakeTensorMode() as mode:
        faked = {k: mode.from_tensor(v) for k, v in tensors.items()}
        assert message(overload(op), **faked, **rest) == eager
        assert message(public(op), **faked, **rest) == eager

    traced = make_fx(lambda given: overload(op)(**given, **rest), tracing_mode="fake")
    assert message(lambda: traced(tensors)) == eager

    if row.label != "other_device":  # on meta, every tensor is on the right device
        meta = message(overload(op), **{k: as_meta(v) for k, v in arguments.items()})
        assert meta == eager.replace(f"on {device}", "on meta")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_named_backend_needs_cuda(backend: str) -> None:
    """The same in eager, fakes, traces and compiled code; a meta tensor's device says nothing."""
    arguments = {**argument_sets("sparse_mla_decode")["all"](CPU), "backend": backend}
    expected = f"backend: expected auto on a CPU, got '{backend}', which needs a CUDA device"
    call = overload("sparse_mla_decode")
    assert message(call, **arguments) == expected
    with FakeTensorMode() as mode:
        faked = {
            k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()
        }
        assert message(call, **faked) == expected
    compiled = torch.compile(public("sparse_mla_decode"), backend="eager", fullgraph=True)
    with pytest.raises(TorchRuntimeError, match=re.escape(expected)):
        compiled(**arguments)
    call(**{name: as_meta(argument) for name, argument in arguments.items()})


@pytest.mark.parametrize(("op", "row"), ONE_ROW_EACH)
def test_compile_carries_the_message(op: str, row: Row) -> None:
    arguments = wrong(op, row, CPU)
    expected = message(overload(op), **arguments)
    torch._dynamo.reset()
    compiled = torch.compile(public(op), backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(TorchRuntimeError, match=re.escape(expected)):
        compiled(**arguments)


@pytest.mark.parametrize("op", OPS)
def test_every_argument_is_covered(op: str) -> None:
    # No wrong value exists for a flag or for the scale; their types are checked below.
    free = {"causal", "batch_invariant", "softmax_scale", "eps"}
    rows = [*own_rows(op), *own_rows(op.removesuffix("_out"))]
    arguments = {a.name for a in overload(op)._schema.arguments}
    assert {row.argument for row in rows} == arguments - free


@pytest.mark.parametrize("op", TWINS)
def test_a_twin_refuses_what_its_functional_form_refuses(op: str) -> None:
    functional = op.removesuffix("_out")
    for row in own_rows(functional):
        arguments = wrong(op, row, CPU)
        assert message(overload(op), **arguments) == message(
            overload(functional), **wrong(functional, row, CPU)
        )


@pytest.mark.parametrize("op", [op for op in OPS if written(op)])
def test_a_refused_call_writes_nothing(op: str) -> None:
    for row in own_rows(op):
        arguments = wrong(op, row, CPU)
        given = {k: arguments[k] for k in written(op) if arguments[k] is not None}
        before = {k: tensor.clone() for k, tensor in given.items() if tensor.device == CPU}
        message(overload(op), **arguments)
        for key, tensor in before.items():
            assert torch.equal(arguments[key], tensor), row


WRONG_TYPES = {"Tensor": [1, 2], "SymInt": 1.5, "int": "1", "float": "1", "bool": "yes", "str": 1}
WRONG_TYPES["ScalarType"] = "float32"


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        pytest.param(op, a.name, id=f"{op}-{a.name}")
        for op in OPS
        for a in overload(op)._schema.arguments
    ],
)
def test_wrong_python_type(op: str, argument: str) -> None:
    schema = {a.name: a for a in overload(op)._schema.arguments}[argument]
    kind = str(schema.real_type).removeprefix("Optional[").removesuffix("]")
    wrong_values = [WRONG_TYPES[kind]]
    if kind in ("SymInt", "int", "float"):
        # A tensor would be read back from its device, a host sync; a flag is a slip of position.
        wrong_values += [torch.tensor(1), True]
    if not str(schema.real_type).startswith("Optional"):
        wrong_values.append(None)
    for wrong_value in wrong_values:
        arguments = {**argument_sets(op)[base_set(op)](CPU), argument: wrong_value}
        with pytest.raises(TypeError, match=rf"^{argument}: expected .*, got ") as caught:
            public(op)(**arguments)
        assert type(wrong_value).__name__ in str(caught.value)
