"""Tables and JSON of made-up measurements."""

from __future__ import annotations

import json

import pytest

from dsv41ops.bench import report
from dsv41ops.bench.timing import summarise
from tests.bench.runs import made_up_run


def cells(table: str) -> list[list[str]]:
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_header_says_what_ran_where() -> None:
    text = report.render(made_up_run())
    for part in ("made-up GPU", "2.11.0", "3.6.0", "python -m dsv41ops.bench --quick", "4000 GB/s"):
        assert part in text.split("\n\n")[0]


def test_decode_table() -> None:
    run = made_up_run()
    rows = cells(report.decode_table(run))
    assert len(rows) == 2 + len(run.decode)
    assert len({len(row) for row in rows}) == 1
    row = dict(zip(rows[0], rows[2], strict=True))
    work = run.decode[0].case.work
    assert row == {
        "records": "584+584",
        "H": "16",
        "T": "1",
        "us": "8.50",
        "triton": "8.50*",
        "flash_mla": "25.0",
        "TFLOP/s": f"{work.flops / 8.5e6:.1f}",
        "GB/s": f"{work.num_bytes / 8.5e3:.0f}",
        "roofline": f"{work.num_bytes / 4e6 / 8.5:.0%}",
        "FlashMLA us": "20.0",
        "ratio": "0.42",
    }


def test_backends_side_by_side() -> None:
    run = made_up_run()
    rows = cells(report.decode_table(run))
    assert [row[4:6] for row in rows[3:7:3]] == [["72.0*", "25.0"], ["8.50*", "-"]]
    alone = cells(report.decode_table(made_up_run(flash_mla=False)))[0]
    assert "triton" in alone
    assert "flash_mla" not in alone
    header = report.header(made_up_run(flash_mla=False)).splitlines()
    assert {"triton: serves", "flash_mla: not installed"} <= set(header)


def test_compute_bound_share() -> None:
    result = made_up_run().decode[-1]  # 528+288 H=64 T=128
    work = result.case.work
    assert work.flops / 800e12 > work.num_bytes / 4e12
    share = made_up_run().share(work, result.timing.us)
    assert share == pytest.approx(work.flops / 800e6 / 72)


def test_ops_table_counts_empty_kernels() -> None:
    rows = cells(report.ops_table(made_up_run()))
    assert rows[2] == ["token_to_request", "", "R=512", "2.00", "-", "-", "1.60"]
    assert rows[3][:4] == ["kv_cache_insert", "mxfp8", "T=512", "2.50"]
    assert rows[4][1:3] == ["4 ranks, H=64", "T=64"]


def test_overview_has_a_line_per_family() -> None:
    text = report.render(made_up_run())
    times, ratios = (cells(part) for part in text.split("\n\n")[-3::2])
    assert times[0] == ["records", "H", "T=1", "T=128"]
    assert times[2] == ["584+584", "16", "8.50", "72.0"]
    assert ratios[5] == ["528+288", "64", "0.42", "3.60"]


def test_without_flash_mla() -> None:
    text = report.render(made_up_run(flash_mla=False))
    assert "FlashMLA: not compared: not installed" in text
    assert "time / FlashMLA's" not in text


@pytest.mark.parametrize("flash_mla", [True, False])
def test_json_round_trip(flash_mla: bool) -> None:
    run = made_up_run(flash_mla)
    data = json.loads(json.dumps(run.as_json()))
    assert len(data["sparse_mla_decode"]) == len(run.decode)
    first, result = data["sparse_mla_decode"][0], run.decode[0]
    assert (first["record"], first["num_heads"], first["num_tokens"]) == ("fp8_ds_mla", 16, 1)
    assert (first["us"], first["fastest_us"], first["slowest_us"]) == (8.5, 7.65, 12.75)
    assert first["ratio"] == result.ratio
    assert first["backend"] == "triton"
    assert first["backend_us"]["triton"] == 8.5
    assert data["backends"]["triton"] is None
    assert data["ops"][0]["R"] == 512
    assert "gb_per_s" not in data["ops"][0]
    assert data["ops"][1]["empty_kernels"] == 2.0


def test_time_is_the_median() -> None:
    timing = summarise([3.0, 1.0, 2.0, 9.0, 2.5])
    assert (timing.us, timing.fastest_us, timing.slowest_us) == (2.5, 1.0, 9.0)
