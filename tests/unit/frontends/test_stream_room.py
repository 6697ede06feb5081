"""What one stream may hold, in requests and in bytes."""

import asyncio

import pytest

from ortserve.frontends.grpc.stream_room import StreamRoom


def has_room(room: StreamRoom) -> bool:
    """Whether a reader would go on without waiting."""
    waiting = room.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


async def test_there_is_room_until_so_many_requests_are_unanswered() -> None:
    room = StreamRoom(max_requests=2, max_bytes=1000)
    room.enter(10)
    assert has_room(room)
    room.enter(10)
    assert not has_room(room)
    room.exchange(10, 10)
    assert not has_room(room), "the answer is not sent yet"
    room.leave(10)
    assert has_room(room)


async def test_there_is_room_until_so_many_bytes_are_held_of_both_sides() -> None:
    room = StreamRoom(max_requests=10, max_bytes=100)
    room.enter(60)
    assert has_room(room)
    room.enter(40)
    assert not has_room(room)
    room.exchange(60, 10)
    assert has_room(room)
    room.exchange(40, 90)
    assert not has_room(room)
    room.leave(90)
    assert has_room(room)
    room.leave(10)
    assert (room.requests, room.held_bytes) == (0, 0)


async def test_a_request_of_any_size_enters_an_empty_room() -> None:
    room = StreamRoom(max_requests=1, max_bytes=1)
    assert has_room(room)
    room.enter(1_000_000)
    assert not has_room(room)


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_reader_goes_on_when_there_is_room(is_waiting: bool) -> None:
    room = StreamRoom(max_requests=1, max_bytes=100)
    room.enter(1)
    reader = asyncio.create_task(room.wait())
    if is_waiting:
        await asyncio.sleep(0)
        assert not reader.done()
    room.leave(1)
    await reader
