"""Legal and illegal frames in any order, sent by the h2 library and by hand, against the guarantees of the server.

The connection always continues or ends with a GOAWAY. A valid call receives its own bytes and status. After the peer
has disconnected, the server holds no resources for it.
"""

import asyncio
import os
import random
from typing import Any

from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop
from native_wire import ECHO, FAIL, HOLD, SLOW, STREAM, Answer, Client, Wire, end, framed
from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native import frames

CANCELLED, DEADLINE, UNIMPLEMENTED = 1, 4, 12
paths = st.sampled_from([ECHO, FAIL, HOLD, SLOW, STREAM, "/nothing/Here"])
sizes = st.sampled_from([0, 1, 5, 100, 16_379, 20_000, 200_000])


def schedules(count: int, *, steps: int) -> settings:
    """Settings for ``count`` schedules.

    A failing schedule is not minimized, which would take longer than a test may.
    """
    count = int(os.environ.get("ORTSERVE_TEST_SCHEDULES", count))
    health = list(HealthCheck)
    phases = [Phase.generate]
    return settings(max_examples=count, stateful_step_count=steps, suppress_health_check=health, phases=phases)


class Call:
    """The frames that a client has sent on a stream."""

    def __init__(self, path: str, stream_id: int) -> None:
        self.path = path
        self.id = stream_id
        self.messages: list[bytes] = []
        self.unsent = b""
        self.has_ended = False
        self.is_reset = False
        self.has_deadline = False

    @property
    def is_wrong(self) -> bool:
        return self.path != STREAM and len(self.messages) != 1


class TransportMachine(RuleBasedStateMachine):
    """A client that follows the protocol; ``MischiefMachine`` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.loop = VirtualTimeLoop(self.clock)
        self.calls: list[Call] = []
        self.random = random.Random(0)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(window=st.sampled_from([0, 1000, 65_535, 1_000_000]), table=st.sampled_from([0, 50, 4096]))
    def connect(self, window: int, table: int) -> None:
        async def make() -> None:
            # Callers may take any time for their answers here.
            self.wire = Wire(
                self.loop,
                self.clock,
                options=GrpcOptions.model_construct(grpc_max_connection_calls=50, grpc_send_timeout_s=10**6),
            )
            chosen = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.HEADER_TABLE_SIZE: table}
            self.client = Client(self.wire, chosen)
            await self.client.exchange()

        self.run(make())

    @property
    def open_calls(self) -> list[Call]:
        asking = [call for call in self.calls if not call.has_ended and not call.is_reset]
        return [call for call in asking if not self.answer(call).is_ended]

    def answer(self, call: Call) -> Answer:
        return self.client.answers[call.id]

    @precondition(lambda self: len(self.open_calls) < 20)
    @rule(path=paths, timeout_ms=st.sampled_from([None, None, 0, 500, 5000]), is_end=st.booleans())
    def open(self, path: str, timeout_ms: int | None, is_end: bool) -> None:
        metadata = () if timeout_ms is None else (("grpc-timeout", f"{timeout_ms}m"),)
        try:
            call = Call(path, self.client.open(path, *metadata, is_end=is_end))
        except ProtocolError:
            return  # h2 enforces the limit on calls
        call.has_deadline = timeout_ms is not None
        call.has_ended = is_end
        self.calls.append(call)

    @precondition(lambda self: self.open_calls)
    @rule(data=st.data(), size=sizes)
    def add_message(self, data: st.DataObject, size: int) -> None:
        call = data.draw(st.sampled_from(self.open_calls))
        message = self.random.randbytes(size)
        call.messages.append(message)
        call.unsent += framed(message)

    @precondition(lambda self: self.open_calls)
    @rule(data=st.data(), most=st.sampled_from([1, 3, 7, 5000, 100_000]), pad=st.sampled_from([None, None, 0, 100]))
    def send(self, data: st.DataObject, most: int, pad: int | None) -> None:
        call = data.draw(st.sampled_from(self.open_calls))
        room = self.client.h2.local_flow_control_window(call.id) - 300
        size = min(len(call.unsent), room, most)
        if size > 0:
            self.client.send(call.id, call.unsent[:size], pad=pad)
            call.unsent = call.unsent[size:]

    @precondition(lambda self: self.open_calls)
    @rule(data=st.data(), with_data=st.booleans())
    def end_request(self, data: st.DataObject, with_data: bool) -> None:
        call = data.draw(st.sampled_from(self.open_calls))
        room = self.client.h2.local_flow_control_window(call.id) - 300
        if len(call.unsent) > min(room, 60_000):
            return
        if not with_data and call.unsent:
            self.client.send(call.id, call.unsent)
            call.unsent = b""
        self.client.send(call.id, call.unsent, is_end=True)
        call.unsent = b""
        call.has_ended = True

    @precondition(lambda self: self.open_calls)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.open_calls))
        self.client.h2.reset_stream(call.id)
        call.is_reset = True

    def change(self, chosen: "dict[SettingCodes | int, int]") -> None:
        """Make one change after the other, because h2 takes the first acknowledgement for all pending changes."""

        async def change() -> None:
            await self.client.exchange()
            self.client.h2.update_settings(chosen)
            await self.client.exchange()

        self.run(change())

    @precondition(lambda self: not self.wire.transport.is_stuck)
    @rule(window=st.sampled_from([0, 1000, 65_535, 200_000]))
    def change_window(self, window: int) -> None:
        self.change({SettingCodes.INITIAL_WINDOW_SIZE: window})

    @precondition(lambda self: not self.wire.transport.is_stuck)
    @rule(size=st.sampled_from([16_384, 20_000, 2**24 - 1]), table=st.sampled_from([0, 10, 4096]))
    def change_sizes(self, size: int, table: int) -> None:
        self.change({SettingCodes.MAX_FRAME_SIZE: size, SettingCodes.HEADER_TABLE_SIZE: table})

    @rule(reads=st.booleans())
    def turn_reading(self, reads: bool) -> None:
        self.client.reads = reads

    @rule(is_stuck=st.booleans())
    def turn_network(self, is_stuck: bool) -> None:
        self.wire.transport.is_stuck = is_stuck

    @rule()
    def exchange(self) -> None:
        self.run(self.client.exchange())

    @rule()
    def release(self) -> None:
        self.wire.release()

    @rule(seconds=st.sampled_from([0.01, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @invariant()
    def connection_is_whole(self) -> None:
        if not hasattr(self, "wire"):
            return
        assert not self.loop.faults, self.loop.faults
        assert not self.client.goaways
        for call in self.calls:
            self.check(call)

    def check(self, call: Call) -> None:
        """An answer contains exactly the sent messages, in order."""
        answer = self.answer(call)
        expected = b"".join(framed(message) for message in call.messages)
        if call.path in (ECHO, HOLD, SLOW):
            expected = framed(call.messages[0]) if call.messages else b""
        assert expected.startswith(answer.data)
        if answer.is_ended and answer.status == 0:
            assert answer.data == expected or (call.path == STREAM and call.is_reset)

    def teardown(self) -> None:
        try:
            if hasattr(self, "wire"):
                self.run(self.finish())
            assert not self.loop.faults, self.loop.faults
        finally:
            self.loop.close()

    async def finish(self) -> None:
        """Read everything and end all requests; then each call must have its status."""
        self.wire.transport.is_stuck = False
        self.client.reads = True
        await self.client.exchange()
        self.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1_000_000})
        self.client.h2.increment_flow_control_window(100_000_000)
        await self.client.exchange()
        for call in self.open_calls:
            if not call.unsent:
                call.messages.append(b"the end")
                call.unsent = framed(b"the end")
            while call.unsent and not self.answer(call).is_ended:
                room = min(self.client.h2.local_flow_control_window(call.id), 16_384)
                part, call.unsent = call.unsent[:room], call.unsent[room:]
                self.client.send(call.id, part, is_end=not call.unsent)
                await self.client.exchange()
        await self.client.exchange()
        for _ in range(3):
            self.wire.release()
            await self.client.exchange()
        for call in self.calls:
            self.check(call)
            answer = self.answer(call)
            if call.is_reset:
                continue
            assert answer.is_ended, f"{call.path} was never answered"
            if call.is_wrong and call.path in (ECHO, HOLD):
                assert answer.status in (UNIMPLEMENTED, 0, DEADLINE)
            elif not call.has_deadline and not call.is_wrong:
                assert answer.status == {FAIL: 3, "/nothing/Here": UNIMPLEMENTED}.get(call.path, 0)
        assert not self.wire.connection._sending.streams
        assert self.wire.connection._sending.unsent_bytes == 0
        await end(self.wire)


TestTransport = TransportMachine.TestCase
TestTransport.settings = schedules(150, steps=40)


kinds = st.one_of(st.integers(0, 10), st.integers(0, 255))
streams = st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1])


class MischiefMachine(RuleBasedStateMachine):
    """A client that sends frames of all kinds by hand, most of them invalid in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.loop = VirtualTimeLoop(self.clock)
        self.next_id = 1
        self.sent = b""

        async def make() -> Wire:
            wire = Wire(self.loop, self.clock, options=GrpcOptions(grpc_max_connection_calls=5))
            wire.feed(frames.PREFACE + frames.settings({}))
            return wire

        self.wire = self.loop.run_until_complete(make())

    def feed(self, data: bytes) -> None:
        async def arrive() -> None:
            self.wire.feed(data)

        self.loop.run_until_complete(arrive())

    @rule(kind=kinds, flags=st.integers(0, 255), stream=streams, payload=st.binary(max_size=40))
    def any_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.feed(frames.frame(kind, flags, stream, payload))

    @rule(path=paths, is_end=st.booleans())
    def open(self, path: str, is_end: bool) -> None:
        block = b"\x83\x86\x04" + bytes((len(path),)) + path.encode() + b"\x0f\x10\x10application/grpc"
        self.feed(frames.header_block(self.next_id, block, 20, is_end=is_end))
        self.next_id += 2

    @rule(stream=streams, payload=st.binary(max_size=300), flags=st.sampled_from([0, 1, 8, 9]))
    def data(self, stream: int, payload: bytes, flags: int) -> None:
        self.feed(frames.frame(frames.DATA, flags, stream, payload))

    @rule(stream=streams, size=st.integers(0, 50), flags=st.sampled_from([0, 1]))
    def message(self, stream: int, size: int, flags: int) -> None:
        self.feed(frames.frame(frames.DATA, flags, stream, framed(bytes(size))))

    @rule(stream=streams, increment=st.sampled_from([0, 1, 65_535, 2**31 - 1]))
    def window(self, stream: int, increment: int) -> None:
        self.feed(frames.window_update(stream, increment))

    @rule(number=st.integers(0, 9), value=st.sampled_from([0, 1, 16_384, 2**31 - 1, 2**31, 2**32 - 1]))
    def setting(self, number: int, value: int) -> None:
        self.feed(frames.settings({number: value}))

    @rule(stream=streams)
    def reset(self, stream: int) -> None:
        self.feed(frames.frame(frames.RST_STREAM, 0, stream, bytes(4)))

    @rule(garbage=st.binary(min_size=1, max_size=30))
    def garbage(self, garbage: bytes) -> None:
        self.feed(garbage)

    @rule(seconds=st.sampled_from([0.0, 0.5, 30.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.sent += self.loop.run_until_complete(self.wire.turn())

    @rule()
    def drain(self) -> None:
        self.wire.connection.begin_drain()

    @invariant()
    def no_fault_occurred(self) -> None:
        assert not self.loop.faults, self.loop.faults
        if self.wire.transport.is_closing():
            self.sent += self.loop.run_until_complete(self.wire.turn())
            self.loop.run_until_complete(self.wire.work.until_done())
            assert self.wire.running == 0
            assert frames.ErrorCode.INTERNAL_ERROR not in self.goaways()

    def goaways(self) -> list[int]:
        """The codes of all sent GOAWAYs."""
        codes, rest = [], self.sent
        while rest:
            length_and_kind, _, _ = frames.read_header(rest)
            frame, rest = rest[: 9 + (length_and_kind >> 8)], rest[9 + (length_and_kind >> 8) :]
            if length_and_kind & 0xFF == frames.GOAWAY:
                codes.append(int.from_bytes(frame[13:17], "big"))
        return codes

    def teardown(self) -> None:
        try:
            self.loop.run_until_complete(end(self.wire))
            assert not self.loop.faults, self.loop.faults
        finally:
            self.loop.close()


TestMischief = MischiefMachine.TestCase
TestMischief.settings = schedules(150, steps=30)
