"""``cupy.cuda.runtime``: the names and signatures of cupy 14.2, which another test compares with cupy's own."""

import ctypes
from typing import Any

_lib = ctypes.CDLL("libcudart.so.13")
_lib.cudaGetErrorName.restype = _lib.cudaGetErrorString.restype = ctypes.c_char_p

eventBlockingSync = 1  # noqa: N816
eventDisableTiming = 2  # noqa: N816
memcpyHostToDevice = 1  # noqa: N816
memcpyDeviceToHost = 2  # noqa: N816
memcpyDeviceToDevice = 3  # noqa: N816


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        name, text = (describe(status).decode() for describe in (_lib.cudaGetErrorName, _lib.cudaGetErrorString))
        super().__init__(f"{name}: {text}")
        self.status = status


def _check(status: int) -> None:
    if status:
        _lib.cudaGetLastError()  # like cupy, so that later calls do not report it
        raise CUDARuntimeError(status)


def _pointer(name: str, *arguments: Any) -> int:
    made = ctypes.c_void_p()
    _check(getattr(_lib, name)(ctypes.byref(made), *arguments))
    return made.value or 0


def getDeviceCount() -> int:  # noqa: N802
    count = ctypes.c_int()
    _check(_lib.cudaGetDeviceCount(ctypes.byref(count)))
    return count.value


def deviceGetPCIBusId(device: int) -> str:  # noqa: N802
    text = ctypes.create_string_buffer(13)
    _check(_lib.cudaDeviceGetPCIBusId(text, 13, device))
    return text.value.decode()


def setDevice(device: int) -> None:  # noqa: N802
    _check(_lib.cudaSetDevice(device))


def memGetInfo() -> tuple[int, int]:  # noqa: N802
    free_bytes, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check(_lib.cudaMemGetInfo(ctypes.byref(free_bytes), ctypes.byref(total)))
    return free_bytes.value, total.value


def malloc(size: int) -> int:
    return _pointer("cudaMalloc", ctypes.c_size_t(size))


def free(ptr: int) -> None:
    _check(_lib.cudaFree(ctypes.c_void_p(ptr)))


def hostAlloc(size: int, flags: int) -> int:  # noqa: N802
    return _pointer("cudaHostAlloc", ctypes.c_size_t(size), flags)


def freeHost(ptr: int) -> None:  # noqa: N802
    _check(_lib.cudaFreeHost(ctypes.c_void_p(ptr)))


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    _check(_lib.cudaMemcpy(ctypes.c_void_p(dst), ctypes.c_void_p(src), ctypes.c_size_t(size), kind))


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    target, source, length = ctypes.c_void_p(dst), ctypes.c_void_p(src), ctypes.c_size_t(size)
    _check(_lib.cudaMemcpyAsync(target, source, length, kind, ctypes.c_void_p(stream)))


def streamCreateWithFlags(flags: int) -> int:  # noqa: N802
    return _pointer("cudaStreamCreateWithFlags", flags)


def streamDestroy(stream: int) -> None:  # noqa: N802
    _check(_lib.cudaStreamDestroy(ctypes.c_void_p(stream)))


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
    _check(_lib.cudaStreamWaitEvent(ctypes.c_void_p(stream), ctypes.c_void_p(event), flags))


def streamEndCapture(stream: int) -> int:  # noqa: N802
    graph = ctypes.c_void_p()
    _check(_lib.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)))
    return graph.value or 0


def graphDestroy(graph: int) -> None:  # noqa: N802
    _check(_lib.cudaGraphDestroy(ctypes.c_void_p(graph)))


def eventCreateWithFlags(flags: int) -> int:  # noqa: N802
    return _pointer("cudaEventCreateWithFlags", flags)


def eventDestroy(event: int) -> None:  # noqa: N802
    _check(_lib.cudaEventDestroy(ctypes.c_void_p(event)))


def eventRecord(event: int, stream: int) -> None:  # noqa: N802
    _check(_lib.cudaEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream)))


def eventSynchronize(event: int) -> None:  # noqa: N802
    _check(_lib.cudaEventSynchronize(ctypes.c_void_p(event)))


def eventElapsedTime(start: int, end: int) -> float:  # noqa: N802
    passed = ctypes.c_float()
    _check(_lib.cudaEventElapsedTime(ctypes.byref(passed), ctypes.c_void_p(start), ctypes.c_void_p(end)))
    return passed.value


def ipcGetMemHandle(devPtr: int) -> bytes:  # noqa: N802, N803
    handle = ctypes.create_string_buffer(64)
    _check(_lib.cudaIpcGetMemHandle(handle, ctypes.c_void_p(devPtr)))
    return handle.raw


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:  # noqa: N802
    return _pointer("cudaIpcOpenMemHandle", _Handle.from_buffer_copy(handle), flags)


def ipcCloseMemHandle(devPtr: int) -> None:  # noqa: N802, N803
    _check(_lib.cudaIpcCloseMemHandle(ctypes.c_void_p(devPtr)))
