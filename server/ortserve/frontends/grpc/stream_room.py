"""What one stream may hold: the requests that are unanswered, and the bytes of both sides."""

import asyncio


class StreamRoom:
    """Counts, and lets the reader of a stream wait for room. Loop thread only."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.requests = 0
        self.held_bytes = 0

    async def wait(self) -> None:
        """Until one more request may enter, of whatever size: it is not known before the request is read."""
        await self._has_room.wait()

    def enter(self, size: int) -> None:
        """Count a request of ``size`` bytes."""
        self.requests += 1
        self._hold(size)

    def exchange(self, request_size: int, answer_size: int) -> None:
        """Count a request's answer in its place."""
        self._hold(answer_size - request_size)

    def leave(self, answer_size: int) -> None:
        """Count an answer out, now that it was sent."""
        self.requests -= 1
        self._hold(-answer_size)

    def _hold(self, change: int) -> None:
        self.held_bytes += change
        if self.requests < self._max_requests and self.held_bytes < self._max_bytes:
            self._has_room.set()
        else:
            self._has_room.clear()
