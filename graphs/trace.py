"""Request traces: the Azure LLM-inference CSV form, and a small trace made here."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceError(ValueError):
    """A trace that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class TraceRow:
    """One request: prompt and answer length in tokens, and where it stands in the trace."""

    context_tokens: int
    generated_tokens: int
    where: str

    @property
    def num_positions(self) -> int:
        """Tokens that enter the caches: the last generated one does not."""
        return self.context_tokens + self.generated_tokens - 1


def read_trace(path: Path) -> list[TraceRow]:
    """Rows of a CSV file in order of arrival."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a CSV text file"
        raise TraceError(f"trace {path}: {reason}") from None
    if not rows or rows[0] != HEADER:
        came = ",".join(rows[0]) if rows else "nothing"
        raise TraceError(f"{path}:1: expected the header {','.join(HEADER)}, got {came}")
    arrivals = [_parse_row(row, f"{path}:{line}") for line, row in enumerate(rows[1:], 2) if row]
    if not arrivals:
        raise TraceError(f"{path}: no requests")
    return [row for _, row in sorted(arrivals, key=lambda arrival: arrival[0])]


def _parse_row(fields: list[str], where: str) -> tuple[tuple[datetime, str], TraceRow]:
    if len(fields) != len(HEADER):
        raise TraceError(f"{where}: expected {len(HEADER)} fields, got {len(fields)}")
    seconds, _, fraction = fields[0].partition(".")
    try:
        # The fraction has 7 digits, which datetime does not take.
        arrival = datetime.strptime(seconds, "%Y-%m-%d %H:%M:%S"), fraction.ljust(9, "0")
    except ValueError:
        raise TraceError(
            f"{where}: TIMESTAMP: expected YYYY-MM-DD HH:MM:SS.fraction, got {fields[0]!r}"
        ) from None
    counts = []
    for name, text in zip(HEADER[1:], fields[1:], strict=True):
        if not (text.strip().isdecimal() and int(text) >= 1):
            raise TraceError(f"{where}: {name}: expected a whole number from 1, got {text!r}")
        counts.append(int(text))
    return arrival, TraceRow(counts[0], counts[1], where)


def sample_trace(num_requests: int = 16, seed: int = 0) -> list[TraceRow]:
    """Mostly short prompts, a few long ones, short answers: enough to mix every kind of step."""
    generator = random.Random(seed)
    return [
        TraceRow(
            context_tokens=min(max(int(generator.lognormvariate(4.2, 1.0)), 3), 400),
            generated_tokens=generator.randint(1, 32),
            where=f"sample request {number}",
        )
        for number in range(1, num_requests + 1)
    ]
