"""Requests and answers without an encoding, for tests that call the inference service directly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import DecodingPlace, InferRequest, InferResponse

T = TypeVar("T")


@dataclass
class Given:
    """An ``EncodedRequest`` that the function ``decode`` produces."""

    decode: Callable[[], InferRequest]
    place: DecodingPlace = DecodingPlace.INLINE
    json_bytes: int = 0
    growth_bytes: int = 0
    is_short: bool = False
    body_bytes: int = 0
    model_name: str = ""

    def decoding_place(self) -> DecodingPlace:
        return self.place

    def read(self) -> InferRequest:
        return self.decode()


@dataclass
class EncodedBy(Generic[T]):
    """An ``AnswerEncoder``; ``spell`` may take long."""

    spell: Callable[[InferRequest, InferResponse], T]
    takes_long: bool = False

    def is_long(self, _request: InferRequest, _response: InferResponse) -> bool:
        return self.takes_long

    def encode(self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None) -> T:
        return self.spell(request, response)


AS_IS = EncodedBy[InferResponse](lambda _, response: response)
"""Returns the service's response as the answer."""
