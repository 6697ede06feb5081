"""Who goes when too many answers wait for their callers."""

import asyncio
from collections import deque

from ortserve.frontends.grpc.native.unsent_room import UnsentRoom


class FakeHolder:
    """Holds answers of these sizes, oldest first."""

    def __init__(self, room: UnsentRoom, *sizes: int) -> None:
        self.answers = deque(sizes)
        self._room = room
        self.texts: list[str] = []
        room.enter(self)
        room.held_bytes += sum(sizes)
        room.look()

    @property
    def unsent_bytes(self) -> int:
        return sum(self.answers)

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        if len(self.answers) <= is_alone:
            return False
        self.texts.append(text)
        self._room.held_bytes -= self.answers.popleft()
        return True


async def settle() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_share_is_a_bound_from_half_of_the_room_on() -> None:
    room = UnsentRoom(100)
    room.held_bytes = 50
    assert not room.is_exceeded_by(50)
    room.held_bytes = 51
    assert room.is_exceeded_by(26)
    assert not room.is_exceeded_by(25)


async def test_largest_holder_loses_its_oldest_until_there_is_room() -> None:
    room = UnsentRoom(100)
    small, large = FakeHolder(room, 30), FakeHolder(room, 20, 25, 26)
    await settle()
    assert (list(small.answers), list(large.answers), room.held_bytes) == ([30], [25, 26], 81)
    assert large.texts == ["grpc_unsent_bytes: callers have not taken 101 bytes of answers, and 100 may wait for them"]
    another = FakeHolder(room, 60)
    await settle()
    assert (list(small.answers), list(large.answers), list(another.answers)) == ([30], [25, 26], [])


async def test_room_that_is_just_full_is_left_as_it_is() -> None:
    room = UnsentRoom(100)
    holders = FakeHolder(room, 50), FakeHolder(room, 50)
    await settle()
    assert [holder.texts for holder in holders] == [[], []]


async def test_only_answer_of_all_may_be_of_any_size() -> None:
    room = UnsentRoom(100)
    alone = FakeHolder(room, 90, 1000)
    await settle()
    assert list(alone.answers) == [1000]


async def test_holder_that_left_is_asked_no_more() -> None:
    room = UnsentRoom(100)
    gone = FakeHolder(room, 500)
    room.leave(gone)
    await settle()
    assert list(gone.answers) == [500]
