"""What the event loop is doing at this moment, for the watchdog that reads it from its own thread."""

from typing import Final

DECODE: Final = "decode"
RUN: Final = "run"
ENCODE: Final = "encode"
NOTHING: Final = ""


class LoopActivity:
    """The step that the loop is in, and the last request that it began to answer.

    Steps are those that a request can make long: decoding, a run on the loop, encoding. Compiled modules have no frames
    that another thread could see, so this is all that is known of them. Each attribute is stored by the loop thread
    alone, without a call, and read by any; they may belong to requests that follow one another.

    Attributes:
        step: ``NOTHING`` between two steps.
        protocol: ``http`` or ``grpc``, of the last request that was decoded or encoded.
        model: Of the last run on the loop or the last answer.
        request_id: Of the last answer, as its caller gave it.
    """

    __slots__ = ("model", "protocol", "request_id", "step")

    def __init__(self) -> None:
        self.step = NOTHING
        self.protocol = ""
        self.model = ""
        self.request_id = ""
