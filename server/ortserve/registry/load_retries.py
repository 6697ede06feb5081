"""When failed loads are tried again."""

from typing import Final

_FIRST_RETRY_S: Final = 60.0
_MAX_RETRY_S: Final = 3600.0
"""Maximum wait between two retries. The wait doubles with each failure."""


class LoadRetries:
    """Schedules retries of failed loads whose files have not changed, because the cause may pass."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, float]] = {}
        """By model: when the next retry is due (clock of the registry, ns), and the wait before it (s)."""

    def note_failure(self, name: str, now_ns: int) -> None:
        """Schedule the next retry of a model."""
        _, waited_s = self._due.get(name, (0, _FIRST_RETRY_S / 2))
        wait_s = min(2 * waited_s, _MAX_RETRY_S)
        self._due[name] = now_ns + round(wait_s * 1e9), wait_s

    def forget(self, name: str) -> None:
        """Cancel the retries of a model that serves, or that should not serve."""
        self._due.pop(name, None)

    def is_due(self, name: str, now_ns: int) -> bool:
        """Whether a retry of the model is due."""
        due = self._due.get(name)
        return due is not None and now_ns >= due[0]
