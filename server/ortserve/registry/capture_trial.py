"""Trying in another process whether a model's CUDA graphs can be captured, before this one does it.

A capture that fails can leave a process without its GPU, and all the models that it serves with it. So a model that
this process has not yet seen captured is opened and captured by ``capture_trial_child`` first, which may refuse, crash
or hang: here each of them is a sentence, and the model runs without replay.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

VERDICT: Final = "verdict: "
"""What the line begins with that the child tells the verdict by."""
TIMEOUT_S: Final = 300.0

_COMMAND: Final = (sys.executable, "-m", "ortserve.registry.capture_trial_child")


@dataclass(frozen=True, slots=True)
class TrialOrder:
    """What is to be tried.

    Attributes:
        path: Of the model file.
        name: Of the model, for log lines.
        provider: The execution provider, in full.
        options: Its options.
        threads: Inside an operator.
        sizes: Rows of the batches to capture.
        settings: Of the session, as ``SessionSettings`` is written as JSON.
        libraries: With operators of the model's own.
        batched: As the model's options have it.
    """

    path: str
    name: str
    provider: str
    options: Mapping[str, str]
    threads: int
    sizes: Sequence[int]
    settings: Mapping[str, Any]
    libraries: Sequence[str] = ()
    batched: bool | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "TrialOrder":
        return TrialOrder(**json.loads(text))


class CaptureTrials:
    """Tries each model until it was captured once, as long as its file stays the same. Not for two loads at once."""

    def __init__(self, command: Sequence[str] = _COMMAND, timeout_s: float = TIMEOUT_S) -> None:
        """``command`` starts the child, ``timeout_s`` is how long it may take."""
        self._command = command
        self._timeout_s = timeout_s
        self._captured: set[tuple[str, int, int]] = set()

    def why_not(self, order: TrialOrder) -> str:
        """Why the model cannot be captured, in words; empty where it was. Blocks for as long as the child takes."""
        file = Path(order.path).stat()
        key = order.to_json(), file.st_mtime_ns, file.st_size
        if key in self._captured:
            return ""
        reason = self._try(order)  # again at the next load: it may have been for want of memory
        if not reason:
            self._captured.add(key)
        return reason

    def _try(self, order: TrialOrder) -> str:
        try:
            child = subprocess.run(  # noqa: S603 - our own interpreter and module
                self._command,
                input=order.to_json(),
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"trying it in another process took more than {self._timeout_s:g} s"
        except OSError as error:
            return f"it could not be tried in another process: {error.strerror}"
        verdicts = [line for line in child.stdout.splitlines() if line.startswith(VERDICT)]
        if verdicts and not child.returncode:
            reason: str = json.loads(verdicts[-1].removeprefix(VERDICT))
            return reason
        how = f"ended by signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"trying it in another process failed: {how}: {last}"
