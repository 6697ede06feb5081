"""Shared memory with the inputs and outputs of all requests of a load, registered at the server."""

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortserve.codecs.binary_tensor import decode_binary_tensor
from ortserve.core.region import RegionSpan
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.control import Control
from ortserve.tools.encoding import Outputs, Placed, encoded


@dataclass(frozen=True, slots=True)
class SharedRequests:
    """A shared memory object with the inputs and outputs of all requests.

    Concurrent requests with the same inputs share their places, as they write the same outputs.
    """

    memory: mmap.mmap
    places: Sequence[tuple[list[Placed], list[Placed]]]

    def read(self, number: int, _: object) -> Outputs:
        """The outputs of a request from the memory. Raises ServeError."""
        outputs: dict[str, Tensor] = {}
        for one, place in self.places[number % len(self.places)][1]:
            data = self.memory[place.offset : place.offset + place.byte_size]
            array = decode_binary_tensor(data, one.datatype, one.array.shape, one.name, "")
            outputs[one.name] = Tensor(one.name, one.datatype, array)
        return outputs


@contextlib.contextmanager
def share_requests(
    control: Control, inputs: Sequence[Sequence[Tensor]], answers: Sequence[Outputs]
) -> Iterator[SharedRequests]:
    """Create shared memory, write the inputs into it, and register it while the block runs.

    Args:
        control: The server.
        inputs: The inputs of each request.
        answers: An answer to each, with outputs of the sizes that later answers have.

    Raises:
        ServeError: The memory cannot be created, or the server does not register it.
    """
    name = f"ortserve_bench_{os.getpid()}_{os.urandom(4).hex()}"  # each target and batch size has its own
    path = Path("/dev/shm") / name  # noqa: S108 - the folder of POSIX shared memory on Linux
    content = bytearray()

    def place(tensor: Tensor) -> Placed:
        piece, offset = encoded(tensor), len(content)
        content.extend(piece + bytes(64 - len(piece) % 64))  # each tensor begins at a multiple of 64
        return tensor, RegionSpan(name, offset, len(piece))

    pairs = zip(inputs, answers, strict=True)
    places = [([place(one) for one in given], [place(one) for one in got.values()]) for given, got in pairs]
    try:
        try:
            with path.open("x+b") as file:
                # Reserves the memory. Without that, a write to memory that the machine lacks would end this process.
                os.posix_fallocate(file.fileno(), 0, len(content))
                memory = mmap.mmap(file.fileno(), len(content))
        except OSError as error:
            text = f"{path}: cannot create shared memory of {len(content)} bytes: {error.strerror}"
            raise ServeError(ErrorKind.UNSUPPORTED, text) from None
        memory[:] = bytes(content)
        control.register(name, len(content))
        try:
            yield SharedRequests(memory, places)
        finally:
            with contextlib.suppress(ServeError):
                control.unregister(name)
    finally:
        path.unlink(missing_ok=True)
