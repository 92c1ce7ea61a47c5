"""Every compile test starts and ends without compiled code, and without gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Tensors are small, and a pool of compile workers would each import torch first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
