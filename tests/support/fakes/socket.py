"""A transport without a socket that accepts all writes at once."""

import asyncio
from collections.abc import Callable
from typing import Any


class FakeSocket(asyncio.Transport):
    """Passes written bytes on until it is closed. It never pauses its protocol."""

    def __init__(self, on_write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._on_write = on_write
        self.is_closed = False

    def write(self, data: Any) -> None:
        if not self.is_closed:
            self._on_write(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def write_eof(self) -> None:
        """Stands for a client that closes its side when it sees the end of the server's."""
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Stands for a protocol that receives no parts of a read: nothing reads from this socket."""
        return asyncio.Protocol()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...
