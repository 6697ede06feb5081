"""A store in memory, whose contents and faults tests choose."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from ortserve.registry.stores.objects import StoredObject, StoreError


class StoreInMemory:
    def __init__(self, **files: bytes) -> None:
        self.files = {f"{name}/1/model.onnx": content for name, content in files.items()}
        self.reads: list[str] = []
        self.is_up = True
        self.wrong: set[str] = set()
        self.on_settle: Callable[[], object] = lambda: None
        self.slow: dict[str, threading.Event] = {}
        """Contents of which nothing arrives until the event is set."""

    def list(self, known: Mapping[str, StoredObject]) -> Iterable[StoredObject]:
        if not self.is_up:
            raise StoreError("down")
        return [
            StoredObject(path, len(content), hashlib.md5(content).hexdigest()) for path, content in self.files.items()
        ]

    def read(self, found: StoredObject) -> Iterator[bytes]:
        self.reads.append(found.path)
        content = self.files[found.path]
        if (is_over := self.slow.get(found.path)) is not None:
            while not is_over.wait(0.001):
                yield b""
        yield content[::-1] if found.path in self.wrong else content

    def settle(self) -> None:
        self.on_settle()
