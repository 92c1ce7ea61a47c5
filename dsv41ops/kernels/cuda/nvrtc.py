"""CUDA C++ compiled at run time, for Hopper; no GPU and no toolkit are needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

OPTIONS = (
    "--gpu-architecture=sm_90a",
    "--std=c++17",
    f"--include-path={Path(__file__).parent}",
)


def compile_cubin(
    text: str, name: str, macros: Iterable[tuple[str, int]], *options: str
) -> tuple[bytes, str]:
    """The cubin of a source under these macros, and the compiler's log.

    Raises:
        RuntimeError: NVRTC refuses the source; the message has the log.
    """
    program = _value(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        options = (*OPTIONS, *options, *(f"-D{macro}={value}" for macro, value in macros))
        encoded = [option.encode() for option in options]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(program)
        if int(error):
            raise RuntimeError(f"NVRTC could not compile {name}: {error.name}\n{log}")
        cubin = _buffer(_value(nvrtc.nvrtcGetCUBINSize(program)))
        _value(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, log


def _text(program: Any) -> str:
    log = _buffer(_value(nvrtc.nvrtcGetProgramLogSize(program)))
    _value(nvrtc.nvrtcGetProgramLog(program, log))
    return log.decode().strip("\0 \n")


def _buffer(size: int) -> bytes:
    """For the bindings to write into: Python shares bytes of length 1, so it must be longer."""
    return b" " * (size + 1)


def _value(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise RuntimeError(f"NVRTC: {error.name}")
    return values[0] if values else None
