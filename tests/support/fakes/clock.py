"""A clock that stands still until a test advances it."""


class FakeClock:
    """A ``Clock`` of whole nanoseconds."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, by_ns: int) -> None:
        assert by_ns >= 0, "time runs one way"
        self.now_ns += by_ns
