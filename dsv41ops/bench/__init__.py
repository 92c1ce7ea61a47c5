"""``python -m dsv41ops.bench``: every op's time on this GPU; see ``docs/benchmarks.md``."""
