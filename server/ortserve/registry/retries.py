"""When to load again what failed and has not changed since: the memory, disk or files that it lacked may be there."""

from typing import Final

_FIRST_S: Final = 60.0
_MOST_S: Final = 3600.0
"""Between two tries, of which each takes twice as long to come as the one before."""


class Retries:
    """Of the models of a registry, by their names."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, float]] = {}
        """When, in nanoseconds of the registry's clock, and how long that was to wait, in seconds."""

    def note(self, name: str, now_ns: int) -> None:
        """A load has failed."""
        _, waited_s = self._due.get(name, (0, _FIRST_S / 2))
        wait_s = min(2 * waited_s, _MOST_S)
        self._due[name] = now_ns + round(wait_s * 1e9), wait_s

    def forget(self, name: str) -> None:
        """It serves, or is not to."""
        self._due.pop(name, None)

    def is_due(self, name: str, now_ns: int) -> bool:
        """Whether it is time to try a model again."""
        due = self._due.get(name)
        return due is not None and now_ns >= due[0]
