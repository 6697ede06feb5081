"""A cache of model outputs for equal requests: those with the same inputs to the same load of a model version.

An entry holds all outputs of the model, or those of some steps of an ensemble. The requested ones are selected and
encoded afterwards. ``cached_runs`` looks
up requests and stores the outputs of their runs.
"""

import asyncio
import os
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.tensor import is_absent
from ortserve.telemetry.readings import CacheReading

Key: TypeAlias = tuple[int, bytes]
"""The number of a load, and the digest of a request's inputs and of the outputs that its run computes."""

_ENTRY_BYTES: Final = 512
"""Memory of an entry in addition to its elements."""
_FORGOTTEN_AT_ONCE: Final = 1000


@dataclass(slots=True)
class _Entry:
    outputs: Arrays
    nbytes: int
    run_ns: int


class ResponseCache:
    """The entries of all models. Beyond ``max_bytes``, the least recently used entries are evicted.

    Loop thread only, except ``key`` and ``reading``.

    Attributes:
        max_bytes: Maximum size of all entries.
        nbytes: Current size of all entries.
        evictions: Number of entries that were evicted.
        hits: As in ``CacheCounts``, of all models; so are ``misses``.
        lookup_ns: Time of all lookups.
        store_ns: Time of storing outputs on the loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes: Final = max_bytes
        self.nbytes = 0
        self.evictions = 0
        self.hits = 0
        self.misses = 0
        self.lookup_ns = 0
        self.store_ns = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._keys: dict[int, set[Key]] = {}
        """Keys of the entries of each load."""
        self._loads = 0
        # Secret, because a client that knows the key could prepare two inputs with one digest.
        self._secret: Final = os.urandom(32)

    def reading(self) -> CacheReading:
        """The present counts, for metrics. Any thread."""
        return CacheReading(
            entries=len(self._entries),
            nbytes=self.nbytes,
            max_bytes=self.max_bytes,
            evictions=self.evictions,
            hits=self.hits,
            misses=self.misses,
            lookup_ns=self.lookup_ns,
            store_ns=self.store_ns,
        )

    def begin_load(self) -> int:
        """Return a number that no other load has, so that no load finds entries of another."""
        self._loads += 1
        return self._loads

    def key(self, load: int, inputs: Arrays, wanted: tuple[str, ...] = ()) -> Key:
        """The key of a request. Any thread.

        Args:
            load: From ``begin_load``.
            inputs: Inputs in the order of the signature; texts are ``str`` or ``bytes`` in arrays of objects.
            wanted: Names of the outputs, if the run computes only these; empty for all.
        """
        digest = blake2b(key=self._secret, digest_size=16)
        if wanted:
            digest.update(repr(wanted).encode())
        for array in inputs:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            if is_absent(array) or not array.size:
                continue
            if array.dtype != object:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
                continue
            texts = [text.encode() if isinstance(text, str) else bytes(text) for text in array.flat]
            digest.update(np.array([len(text) for text in texts], np.int64).tobytes())
            digest.update(b"".join(texts))
        return load, digest.digest()

    def find(self, key: Key) -> "_Entry | None":
        """The entry of a key, which becomes the most recently used one; None if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def store(self, key: Key, outputs: Arrays, outputs_bytes: int, run_ns: int) -> None:
        """Store outputs, which must not change any more. Outputs larger than the cache are not stored."""
        nbytes = _ENTRY_BYTES + outputs_bytes
        if nbytes > self.max_bytes or key in self._entries:
            return
        self._entries[key] = _Entry(outputs, nbytes, run_ns)
        self._keys.setdefault(key[0], set()).add(key)
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            oldest, entry = self._entries.popitem(last=False)
            self._keys[oldest[0]].discard(oldest)
            self.nbytes -= entry.nbytes
            self.evictions += 1

    async def forget(self, load: int) -> None:
        """Drop the entries of a load that has ended. Pauses regularly, so that other work of the loop can run."""
        keys = self._keys.get(load, set())
        while keys:
            self.nbytes -= self._entries.pop(keys.pop()).nbytes
            if len(keys) % _FORGOTTEN_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._keys.pop(load, None)
