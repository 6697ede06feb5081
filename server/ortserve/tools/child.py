"""A call in a process of its own: for what may crash or run out of memory, or whose memory is to be measured.

Run as a program, this module is that other process.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.errors import ServeError, invalid_input

_Result = TypeVar("_Result")


def call_in_child(timeout_s: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function of a module in another process, and end that process.

    Raises:
        ServeError: invalid_input: the function raised it or an error of ONNX Runtime, or the process gave no result in
            time.
    """
    try:
        child = subprocess.run(  # noqa: S603 - this interpreter, and this module
            [sys.executable, "-m", __name__],
            input=pickle.dumps((function, arguments)),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise invalid_input(f"gave no result within {timeout_s:g} s") from None
    if not child.stdout:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        last = (child.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise invalid_input(f"the other process ended with {how}: {last[:500]}")
    outcome: tuple[_Result, str] = pickle.loads(child.stdout)  # noqa: S301 - written by the code below
    result, problem = outcome
    if problem:
        raise invalid_input(problem)
    return result


def _main() -> None:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the code above
    try:
        outcome = (function(*arguments), "")
    except ServeError as error:
        outcome = (None, error.message)
    except ORT_ERRORS as error:
        outcome = (None, without_paths(str(error)))
    with answer:
        pickle.dump(outcome, answer)
    os._exit(0)  # releasing a session may take long, and may crash


if __name__ == "__main__":
    _main()
