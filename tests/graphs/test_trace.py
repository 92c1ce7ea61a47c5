"""Reading request traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphs.trace import TraceError, read_trace, sample_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:17:03.9799600,4808,10\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_in_order_of_arrival(tmp_path: Path) -> None:
    text = HEADER + ROW + "2023-11-16 18:17:03.9799599,7,1\n\n2023-11-15 00:00:00,3,2\n"
    rows = read_trace(write(tmp_path, text))
    assert [(row.context_tokens, row.generated_tokens) for row in rows] == [
        (3, 2),
        (7, 1),
        (4808, 10),
    ]
    assert rows[0].where.endswith(":5")
    assert rows[0].num_positions == 4


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(("\ufeff" + HEADER + ROW).replace("\n", "\r\n").encode())
    assert read_trace(path)[0].context_tokens == 4808


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv:1: expected the header"),
        ("A,B,C\n" + ROW, "trace.csv:1: expected the header .* got A,B,C"),
        (HEADER, "no requests"),
        (HEADER + ROW + "2023-11-16 18:17:03.9,5\n", "trace.csv:3: expected 3 fields, got 2"),
        (HEADER + "yesterday,5,5\n", "trace.csv:2: TIMESTAMP: .* got 'yesterday'"),
        (HEADER + ROW + ROW.replace("4808", "x"), "trace.csv:3: ContextTokens: .* got 'x'"),
        (HEADER + ROW.replace("4808", "0"), "trace.csv:2: ContextTokens: .* got '0'"),
        (HEADER + ROW.replace(",10", ",-1"), "trace.csv:2: GeneratedTokens: .* got '-1'"),
        (HEADER + ROW.replace(",10", ",1.5"), "trace.csv:2: GeneratedTokens: .* got '1.5'"),
    ],
)
def test_malformed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, text))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TraceError, match="not a CSV text file"):
        read_trace(path)


def test_sample_is_stable_and_varied() -> None:
    rows = sample_trace()
    assert rows == sample_trace()
    assert len({row.context_tokens for row in rows}) > 10
    assert all(row.context_tokens >= 1 and row.generated_tokens >= 1 for row in rows)
