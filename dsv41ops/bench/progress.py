"""Where a run is, on stderr: one line that is overwritten, or now and then a line in a log."""

from __future__ import annotations

import sys
from typing import TextIO

WIDTH = 24
LOG_LINES = 20


class Progress:
    """``step(label)`` announces the next of ``total`` pieces of work."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total = total
        self.done = 0
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()

    def step(self, label: str) -> None:
        self.done += 1
        filled = WIDTH * self.done // self.total
        bar = "#" * filled + "." * (WIDTH - filled)
        line = f"[{bar}] {self.done}/{self.total} {label}"
        if self.live:
            self.stream.write(f"\r\x1b[K{line}")
        elif self.done == 1 or self.done % -(-self.total // LOG_LINES) == 0:
            self.stream.write(f"{line}\n")
        self.stream.flush()

    def close(self) -> None:
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
