"""The trace of one request as Triton's trace files spell it, for the tools that read those.

Each trace is one object with all its timestamps. Triton writes an object for each timestamp and its readers put those
of one ``id`` together, so that both read the same (docs/user_guide/trace.md and qa/common/trace_summary.py of
triton-inference-server/server). Nothing of a request's or an answer's tensors is in it.
"""

import json
from typing import Final

from ortserve.core.timing import Timing

_NAMED_CHARACTERS: Final = 256
"""Callers choose how long the id of a request is; this much of it is written."""


def spell_record(
    number: int,
    model: str,
    version: str,
    request_id: str,
    protocol: str,
    timing: Timing,
    *,
    ended_ns: int,
    sent_ns: int | None,
) -> bytes:
    """Spell a trace as JSON.

    Args:
        number: Of the trace; those of a server differ.
        model: Whose trace it is.
        version: Digits.
        request_id: What the caller named it, or ``""``.
        protocol: ``http`` or ``grpc``.
        timing: Of the request; points that were not reached are left out.
        ended_ns: When the answer, or the error in its place, was ready to be sent.
        sent_ns: When it had been sent; None where nobody was there any more.
    """
    received_ns = timing.received_ns
    if protocol == "http":
        side = "HTTP"
        points = [("HTTP_RECV_START", timing.begun_ns or received_ns), ("HTTP_RECV_END", received_ns)]
    else:
        # How long a message took to come is grpc's knowledge.
        side = "GRPC"
        points = [("GRPC_WAITREAD_START", received_ns), ("GRPC_WAITREAD_END", received_ns)]
    points.append(("REQUEST_START", received_ns))
    if timing.queued_ns:
        points.append(("QUEUE_START", timing.queued_ns))
    if timing.taken_ns:
        points.append(("COMPUTE_START", timing.taken_ns))
        if timing.computed_ns:
            points += (("COMPUTE_INPUT_END", timing.staged_ns), ("COMPUTE_OUTPUT_START", timing.computed_ns))
        points.append(("COMPUTE_END", ended_ns))
    points.append(("REQUEST_END", ended_ns))
    if sent_ns is not None:
        points += ((f"{side}_SEND_START", ended_ns), (f"{side}_SEND_END", sent_ns))
    named = f',"request_id":{json.dumps(request_id[:_NAMED_CHARACTERS])}' if request_id else ""
    timestamps = ",".join(f'{{"name":"{name}","ns":{ns}}}' for name, ns in points)
    head = f'{{"id":{number},"model_name":{json.dumps(model)},"model_version":{int(version)}{named}'
    return f'{head},"timestamps":[{timestamps}]}}'.encode()
