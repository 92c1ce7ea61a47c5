"""The cases of a run, and the work that is counted for them."""

from __future__ import annotations

import pytest

from dsv41ops.bench.problems import HEADS, RECORD_PAIRS, ROW_OPS, TOKENS, DecodeCase, OpCase, plan
from dsv41ops.layouts import RECORDS
from dsv41ops.schemas import SCHEMAS


def test_decode_work_of_one_token() -> None:
    work = DecodeCase("mxfp8", "nvfp4", 64, 1).work
    assert work.flops == 4 * 64 * 640 * 512  # a product and a sum, for q · k and for weights · v
    rows = 128 * 528 + 512 * 288
    assert work.num_bytes == rows + 642 * 4 + 64 * (1024 + 1024 + 4) + 64 * 4


def test_decode_work_is_the_issue_s_floor() -> None:
    """0.106 us of tensor cores and 0.087 us of rows per token at H = 64 and 584 bytes."""
    work = DecodeCase("fp8_ds_mla", "fp8_ds_mla", 64, 1).work
    assert work.flops / 790e12 * 1e6 == pytest.approx(0.106, abs=5e-4)
    rows_us = 640 * 584 / 4.3e12 * 1e6
    assert rows_us == pytest.approx(0.087, abs=5e-4)
    assert work.num_bytes > 640 * 584


@pytest.mark.parametrize(
    ("case", "num_bytes"),
    [
        (OpCase("kv_cache_insert", 3, "fp8_ds_mla"), 3 * (584 + 1024 + 4)),
        (OpCase("rope_kv_cache_insert", 2, "nvfp4"), 2 * (288 + 1024 + 4 + 8 + 256)),
        (OpCase("kv_cache_gather", 1, "bf16"), 1024 + 1024 + 4),
        (OpCase("compress_kv", 2), 2 * (3 * 4096 + 1024 + 12) + 2048),
        (OpCase("indexer_k_insert", 3, "fp8"), 3 * (132 + 512 + 4 + 8 + 256) + 512),
        (OpCase("indexer_k_insert", 1, "mxfp4"), 68 + 512 + 4 + 8 + 256 + 512),
        (OpCase("merge_attention_states", 2), 2 * 64 * 5 * (1024 + 4) + 64 * 4),
        (OpCase("merge_topk", 2), 2 * 5 * 512 * 8),
    ],
    ids=lambda value: value.label if isinstance(value, OpCase) else "",
)
def test_op_work(case: OpCase, num_bytes: int) -> None:
    assert case.work is not None
    assert (case.work.flops, case.work.num_bytes) == (0, num_bytes)


def test_full_plan() -> None:
    cases = plan(quick=False)
    asked = {(*pair, H, T) for pair in RECORD_PAIRS for H in HEADS for T in TOKENS}
    got = [(c.window_record, c.record, c.num_heads, c.num_tokens) for c in cases.decode]
    assert len(got) == len(asked)
    assert set(got) == asked
    assert {"584+584", "528+528", "528+288"} <= {case.pair for case in cases.decode}
    functional = {op for op in SCHEMAS if not op.endswith("_out")}
    assert {case.op for case in cases.ops} == functional - {"sparse_mla_decode"}
    for op in ROW_OPS:
        records = {case.record for case in cases.ops if case.op == op}
        assert records == {record.name for record in RECORDS}


def test_quick_plan_is_a_part_of_the_full_one() -> None:
    quick, full = plan(quick=True), plan(quick=False)
    assert set(quick.decode) < set(full.decode)
    assert set(quick.ops) < set(full.ops)
    assert {case.op for case in quick.ops} == {case.op for case in full.ops}


@pytest.mark.parametrize("quick", [False, True])
def test_smallest_and_largest_of_each_family_are_checked(quick: bool) -> None:
    cases = plan(quick)
    checked = cases.checked()
    assert len(checked) == len(set(checked))
    for case in cases.decode:
        sizes = [
            c.num_tokens
            for c in checked
            if isinstance(c, DecodeCase) and (c.pair, c.num_heads) == (case.pair, case.num_heads)
        ]
        assert min(sizes) <= case.num_tokens <= max(sizes)
    for op in cases.ops:
        sizes = [
            c.size
            for c in checked
            if isinstance(c, OpCase) and (c.op, c.record) == (op.op, op.record)
        ]
        assert min(sizes) <= op.size <= max(sizes)
