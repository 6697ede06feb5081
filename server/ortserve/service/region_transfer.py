"""One request's tensors in shared memory: inputs are copied out of it before the run, outputs into it afterwards."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from ortserve.codecs.binary_tensor import decode_binary_tensor, encode_binary_tensor
from ortserve.core.region import RegionInput, RegionUse
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.gate import BodyGate
from ortserve.service.shared_memory import SharedMemory

_INLINE_BYTES: Final = 2 * 1024 * 1024
"""What is copied on the loop, in about 0.15 ms; more goes to a thread."""


class RegionTransfer:
    """Holds what a request needs, for as long as a ``with`` block lasts. Loop thread only."""

    def __init__(self, regions: SharedMemory, use: RegionUse, gate: BodyGate) -> None:
        """Lease the regions, and count the inputs among the bytes that the server holds.

        Raises:
            ServeError: unsupported, not_found or invalid_input, as ``SharedMemory.lease`` says; too_large or
                overloaded, for inputs of more bytes than the server may hold.
        """
        self._use = use
        self._threads = regions.threads
        self._copying: asyncio.Future[None] | None = None
        self._leases = regions.lease([*(given.span for given in use.inputs), *use.outputs.values()])
        self._input_bytes = sum(given.span.byte_size for given in use.inputs)
        try:
            if self._input_bytes > gate.max_bytes:
                raise ServeError(
                    ErrorKind.TOO_LARGE,
                    f"inputs in shared memory are larger than max_inflight_bytes: expected at most {gate.max_bytes} "
                    f"bytes, got {self._input_bytes}",
                )
            self._hold = gate.hold(self._input_bytes)
        except ServeError:
            self._leases.release()
            raise

    async def fetch(self, model: str) -> list[Tensor]:
        """Return the inputs that lie in regions; ``model`` is for the messages.

        Raises:
            ServeError: invalid_input, when bytes are not those of the tensor, or are there no more.
        """
        fetched: list[Tensor] = []
        await self._do(
            self._input_bytes, lambda: fetched.extend(self._read(given, model) for given in self._use.inputs)
        )
        return fetched

    async def place(self, outputs: Sequence[Tensor]) -> None:
        """Write those of ``outputs`` that the caller wants in regions: all of them or, unless a write fails, none.

        Raises:
            ServeError: internal, when a region is too small for its output or cannot be written; invalid_input, when
                its memory is there no more.
        """
        placed = [tensor for tensor in outputs if tensor.name in self._use.outputs]
        if placed:
            await self._do(sum(tensor.array.nbytes for tensor in placed), lambda: self._write(placed))

    def __enter__(self) -> "RegionTransfer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._copying is None or self._copying.done():
            self._release()
        else:  # the caller left meanwhile
            self._copying.add_done_callback(self._release_after)

    async def _do(self, byte_size: int, copy: Callable[[], None]) -> None:
        if byte_size <= _INLINE_BYTES and not self._leases.may_wait:
            copy()
            return
        # A thread cannot be stopped: where this task is cancelled, its copy goes on, on memory that must stay open.
        self._copying = asyncio.get_running_loop().run_in_executor(self._threads, copy)
        await asyncio.shield(self._copying)

    def _read(self, given: RegionInput, model: str) -> Tensor:
        data = self._leases.memory(given.span).read(given.span.offset, given.span.byte_size)
        array = decode_binary_tensor(data, given.datatype, given.shape, given.name, model)
        return Tensor(given.name, given.datatype, array)

    def _write(self, placed: list[Tensor]) -> None:
        pieces = []
        for tensor in placed:
            span = self._use.outputs[tensor.name]
            piece = encode_binary_tensor(tensor.array, tensor.datatype)
            if len(piece) > span.byte_size:
                raise ServeError(
                    ErrorKind.INTERNAL,
                    f"shared memory size specified with the request for output '{tensor.name}' ({span.byte_size} "
                    f"bytes) should be at least {len(piece)} bytes to hold the results",
                )
            pieces.append((span, piece))
        for span, piece in pieces:
            self._leases.memory(span).write(span.offset, piece)

    def _release_after(self, copying: asyncio.Future[None]) -> None:
        if not copying.cancelled():
            copying.exception()  # nobody is left to hear of it
        self._release()

    def _release(self) -> None:
        self._leases.release()
        self._hold.release()
