"""A cubin's kernel, loaded and launched through NVIDIA's bindings of the driver API."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver


class Kernel:
    """A kernel on the device that is current when this is made.

    Its module says in ``shared_bytes`` how much dynamic shared memory it takes.
    """

    def __init__(self, cubin: bytes, name: str) -> None:
        self._module = _value(driver.cuModuleLoadData(cubin))
        self._context = _value(driver.cuCtxGetCurrent())
        self._function = _value(driver.cuModuleGetFunction(self._module, name.encode()))
        self._shared_bytes = self._constant("shared_bytes")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _value(driver.cuFuncSetAttribute(self._function, attribute, self._shared_bytes))

    def _constant(self, name: str) -> int:
        """The value of a ``__device__ unsigned``."""
        address, size = _value(driver.cuModuleGetGlobal(self._module, name.encode()))
        value = ctypes.c_uint()
        _value(driver.cuMemcpyDtoH(ctypes.addressof(value), address, size))
        return value.value

    def launch(self, ctas: int, threads: int, cluster: int, stream: int) -> Launch:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = stream
        kinds = driver.CUlaunchAttributeID
        # Its CTAs may come while the launch before it ends; the kernels wait for that themselves.
        overlap = driver.CUlaunchAttribute()
        overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes = [overlap]
        if cluster > 1:
            clusters = driver.CUlaunchAttribute()
            clusters.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = clusters.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = cluster, 1, 1
            clusters.value.clusterDim = dimensions
            attributes.append(clusters)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return Launch(self._function, self._context, config)


class Launch:
    """A kernel with everything but its parameters; threads may share it."""

    def __init__(self, function: Any, context: Any, config: Any) -> None:
        self._function = function
        self._context = context
        self._config = config

    def __call__(self, params: bytes) -> None:
        """Launch with one parameter, these bytes, which the driver copies."""
        pointer = ctypes.c_char_p(params)
        arguments = (self._config, self._function, ctypes.addressof(pointer), 0)
        (error,) = driver.cuLaunchKernelEx(*arguments)
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # This thread has not used CUDA before.
            _value(driver.cuCtxSetCurrent(self._context))
            (error,) = driver.cuLaunchKernelEx(*arguments)
        if int(error):
            raise RuntimeError(f"CUDA driver: {error.name}")


def _value(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if len(values) == 1 else values
