"""One captured CUDA graph per padded size of a step, replayed for any batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import torch

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


def pick_bucket(sizes: Iterable[int], num_tokens: int) -> int:
    """The smallest size that holds ``num_tokens``; a ValueError if none does."""
    sizes = tuple(sizes)
    fitting = [size for size in sizes if size >= num_tokens]
    if num_tokens < 0 or not fitting:
        raise ValueError(
            f"num_tokens: expected 0 to {max(sizes)}, the largest bucket, got {num_tokens}"
        )
    return min(fitting)


class GraphRunner(Generic[Inputs, Outputs]):
    """Captures ``step`` once per bucket, and replays the smallest bucket that fits a batch.

    Fill :meth:`inputs`, padding included, then :meth:`run`::

        runner = GraphRunner(step, {size: make_inputs(size) for size in (8, 64)})
        runner.inputs(5).token_ids.copy_(token_ids)
        logits = runner.run(5)

    The graphs share one memory pool, so only one of them runs at a time: a replay on another
    stream than the last one waits for that stream. A step may be compiled by ``torch.compile`` or
    not; it is compiled and its kernels are warm before the first capture.

    Args:
        step: Takes a bucket's inputs, reads sizes from shapes and everything else on the device.
            The runner keeps it: the graphs use the weights and caches that it holds.
        buckets: Size in tokens to static inputs, anything that ``step`` takes. The caller may
            keep filling these or leave them to the runner; their addresses must not change. They
            must hold a batch that may run any number of times, as one that is all padding:
            ``step`` runs on it to warm up.
        device: The CUDA device of everything above; the current one when None.

    Raises:
        ValueError: No bucket, or a size below 1.
        RuntimeError: No CUDA device, or constructed while a graph is captured.
    """

    WARM_UP_RUNS = 2

    def __init__(
        self,
        step: Callable[[Inputs], Outputs],
        buckets: Mapping[int, Inputs],
        device: torch.device | str | None = None,
    ) -> None:
        if not buckets or min(buckets) < 1:
            raise ValueError(f"buckets: expected sizes of at least 1, got {list(buckets)}")
        if not torch.cuda.is_available():
            raise RuntimeError("GraphRunner: CUDA graphs need a CUDA device, there is none here")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("GraphRunner: constructed while a CUDA graph is captured")
        self._step = step
        self._buckets = dict(sorted(buckets.items()))
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        with torch.cuda.device(device):
            self._device = torch.cuda.current_device()
            # One stream for warm-up and capture: a library's workspace, which belongs to a stream,
            # is then allocated before any capture and not inside one.
            self._last_stream = torch.cuda.Stream()
            self._capture(self._last_stream)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets, ascending; one captured graph each."""
        return tuple(self._buckets)

    def inputs(self, num_tokens: int) -> Inputs:
        """The static inputs that :meth:`run` will use; what the last replay reads is not disturbed.

        Filling them is ordered on the stream that is current now.
        """
        self._follow_last_replay()
        return self._buckets[pick_bucket(self._buckets, num_tokens)]

    def run(self, num_tokens: int) -> Outputs:
        """Replay for the batch that the inputs hold, on the current stream; waits for nothing.

        Returns:
            What ``step`` returned while it was captured: the same tensors every time, valid until
            the next replay of any bucket. Copy what has to last longer.

        Raises:
            ValueError: No bucket holds ``num_tokens``.
        """
        graph, outputs = self._graphs[pick_bucket(self._buckets, num_tokens)]
        self._follow_last_replay()
        graph.replay()
        return outputs

    def _follow_last_replay(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if stream != self._last_stream:
            stream.wait_stream(self._last_stream)
            self._last_stream = stream

    def _capture(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        descending = sorted(self._buckets, reverse=True)
        with torch.cuda.stream(stream):
            for size in descending:
                for _ in range(self.WARM_UP_RUNS):
                    self._step(self._buckets[size])
        pool = torch.cuda.graph_pool_handle()
        for size in descending:  # smaller ones fit into the memory of the largest
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self._step(self._buckets[size])
            self._graphs[size] = (graph, outputs)
