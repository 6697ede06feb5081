"""The tensors of one request in shared memory: copies inputs out before its run, and outputs in after it."""

import asyncio
from collections.abc import Callable, Sequence
from math import prod
from types import TracebackType
from typing import Final

from ortserve.codecs.binary_tensor import decode_binary_tensor, encode_binary_tensor
from ortserve.codecs.bounds import INLINE_BYTES, INLINE_TEXTS
from ortserve.core.batch import deep_bytes
from ortserve.core.dtypes import DataType
from ortserve.core.region import RegionInput, RegionUse
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.gate import BodyGate, Reservation
from ortserve.service.shared_memory import SharedMemory

_INLINE_COPY_BYTES: Final = 2 * 1024 * 1024
"""Maximum size of a copy on the event loop, which takes about 0.15 ms. Larger copies, and many texts, use a thread."""


class RegionTransfer:
    """Holds the leases and the reserved memory of a request during a ``with`` block. Loop thread only."""

    def __init__(self, regions: SharedMemory, use: RegionUse, gate: BodyGate) -> None:
        """Lease the regions, and reserve memory for the inputs.

        Raises:
            ServeError: The errors of ``SharedMemory.lease``; too_large or overloaded, for inputs of more bytes than the
                server may hold.
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
            self._reservation = Reservation(gate, self._input_bytes)
        except ServeError:
            self._leases.release()
            raise

    async def read_inputs(self, model: str) -> list[Tensor]:
        """Copy the inputs out of their regions. ``model`` is the name of the model, for errors.

        Raises:
            ServeError: invalid_input, if bytes are invalid for their tensor, or the region has become too small.
        """
        fetched: list[Tensor] = []
        texts = [given for given in self._use.inputs if given.datatype is DataType.BYTES]
        is_long = (
            self._input_bytes > _INLINE_COPY_BYTES
            or sum(given.span.byte_size for given in texts) > INLINE_BYTES
            or sum(prod(given.shape) for given in texts) > INLINE_TEXTS
        )
        await self._copy(lambda: fetched.extend(self._read(given, model) for given in self._use.inputs), is_long)
        return fetched

    async def write_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Copy the outputs that the caller requested in regions. Sizes are checked before the first write.

        Raises:
            ServeError: internal, if a span is too small for its output or a region cannot be written; invalid_input, if
                the region has become too small.
        """
        in_regions = [tensor for tensor in outputs if tensor.name in self._use.outputs]
        texts = sum(tensor.array.size for tensor in in_regions if tensor.datatype is DataType.BYTES)
        is_long = texts > INLINE_TEXTS or deep_bytes(tuple(tensor.array for tensor in in_regions)) > _INLINE_COPY_BYTES
        if in_regions:
            await self._copy(lambda: self._write(in_regions), is_long)

    def __enter__(self) -> "RegionTransfer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._copying is None or self._copying.done():
            self._release()
        else:  # the call was cancelled during a copy
            self._copying.add_done_callback(self._release_after)

    async def _copy(self, copy: Callable[[], None], is_long: bool) -> None:
        if not is_long and not self._leases.may_wait:
            copy()
            return
        # A thread cannot be stopped: after a cancellation its copy continues, and its memory must stay open.
        self._copying = asyncio.get_running_loop().run_in_executor(self._threads, copy)
        await asyncio.shield(self._copying)

    def _read(self, given: RegionInput, model: str) -> Tensor:
        data = self._leases.memory(given.span).read(given.span.offset, given.span.byte_size)
        array = decode_binary_tensor(data, given.datatype, given.shape, given.name, model)
        return Tensor(given.name, given.datatype, array)

    def _write(self, in_regions: list[Tensor]) -> None:
        pieces = []
        for tensor in in_regions:
            span = self._use.outputs[tensor.name]
            piece = encode_binary_tensor(tensor.array, tensor.datatype, self._reservation.memory)
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
            copying.exception()  # marks it as retrieved; the call is cancelled
        self._release()

    def _release(self) -> None:
        self._leases.release()
        self._reservation.release()
