"""Compressed bodies of requests and answers, for the lane and the ASGI route: short work on the loop, long in a thread.

Lengths in ``Inference-Header-Content-Length`` are those of bodies without compression, both ways.
"""

from typing import Final

from ortserve.codecs.compression import Encoding, Inflater, compress, is_worth_compressing
from ortserve.frontends.http.answers import Answer
from ortserve.frontends.inflating import inflate_all
from ortserve.service.gate import Hold

_INLINE_BYTES: Final = 64 * 1024
"""Bodies of this size are compressed in about 0.6 ms."""


async def inflate(
    body: bytes | memoryview, encoding: Encoding, hold: Hold, *, max_bytes: int, max_json_bytes: int | None = None
) -> bytes | memoryview:
    """Undo the encoding of a request's body, which is as long as ``hold`` says; what it grows by is held, too.

    ``max_json_bytes`` is the limit of a body that is nothing but JSON, None for another.

    Raises:
        ServeError: too_large, as soon as it is; overloaded; invalid_input for what is not of the encoding.
    """
    option = "max_body_bytes"
    if max_json_bytes is not None and max_json_bytes < max_bytes:
        max_bytes, option = max_json_bytes, "max_json_bytes"
    inflater = Inflater(body, encoding, max_bytes, option=option)
    return await inflate_all(inflater, came_bytes=len(body), hold=hold.grow, memory=hold.memory)


def is_to_compress(answer: Answer, encoding: Encoding | None, *, min_bytes: int) -> bool:
    """Whether an answer is compressed: it is no error, the caller wants it, it is large enough, and it would shrink."""
    return (
        answer.status == 200
        and encoding is not None
        and len(answer.body) >= min_bytes
        and is_worth_compressing(answer.body)
    )


def compressed(answer: Answer, encoding: Encoding) -> Answer:
    """The answer with its body compressed. Any thread."""
    named = (b"content-encoding", encoding.value.encode())
    return Answer(answer.status, compress(answer.body, encoding), (*answer.headers, named))


def is_quickly_compressed(answer: Answer) -> bool:
    """Whether ``compressed`` may run on the loop."""
    return len(answer.body) <= _INLINE_BYTES
