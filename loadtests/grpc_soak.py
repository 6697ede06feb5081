"""Does the memory of the native gRPC transport stay constant over millions of calls?

Level: server. Expected: in 10 minutes with at least 5 million calls on many short and long connections no call fails,
and the last third of the run adds less than 5 MiB of resident memory.

    python loadtests/grpc_soak.py [--minutes 10] [--calls 5000000]

Runs until both the time and the number of calls are reached. Calls are of all kinds: answered, refused, cancelled,
timed out, streamed and compressed. Connections are used for a while and closed, gracefully or not. Writes
``loadtests/results/grpc_soak.md``. Exits with 1 if the memory grew by more.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import grpc  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402

from harness import h2load, serving, table, write_report  # noqa: E402
from infer_requests import INFER, grpc_request, numbers_of_grpc  # noqa: E402
from models.builders import identity  # noqa: E402
from ortserve._pb import grpc_service_pb2 as pb  # noqa: E402

PORT = 18120
BULK_CALLS = 20_000
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_GROWTH_MIB = 5.0


def message_with(value: float) -> bytes:
    return grpc_request("identity", np.full((1, 4), value, np.float32))


def unary(channel: grpc.aio.Channel) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
    return channel.unary_unary(INFER)


def stream(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamMultiCallable[bytes, bytes]":
    return channel.stream_stream(STREAM_INFER)


async def read(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> pb.ModelStreamInferResponse:
    data: object = await call.read()
    assert isinstance(data, bytes)
    return pb.ModelStreamInferResponse.FromString(data)


class Soak:
    """Makes calls until a given time, and counts their outcomes."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.outcomes: Counter[str] = Counter()
        self._folder = folder

    def bulk(self) -> None:
        """Make many calls with h2load on new connections."""
        self.outcomes["answered"] += h2load(
            self.address, message_with(1), self._folder, connections=8, streams=16, calls=BULK_CALLS
        )

    async def odd(self, rng: random.Random) -> None:
        """Open a connection and make a call of every kind."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(self.address, options) as channel:
            for _ in range(rng.randrange(1, 20)):
                kind = rng.choice((self._answered, self._refused, self._cancelled, self._late, self._streamed))
                self.outcomes[await kind(channel, rng)] += 1

    async def _answered(self, channel: grpc.aio.Channel, rng: random.Random) -> str:
        value = rng.random()
        compression = rng.choice((grpc.Compression.NoCompression, grpc.Compression.Gzip))
        answer = await unary(channel)(message_with(value), timeout=60, compression=compression)
        assert (numbers_of_grpc(answer) == np.float32(value)).all()
        return "answered"

    async def _refused(self, channel: grpc.aio.Channel, _rng: random.Random) -> str:
        call = unary(channel)(b"\xff", timeout=60)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        return "refused"

    async def _cancelled(self, channel: grpc.aio.Channel, _rng: random.Random) -> str:
        call = stream(channel)()
        await call.write(message_with(1))
        call.cancel()
        return "cancelled"

    async def _late(self, channel: grpc.aio.Channel, _rng: random.Random) -> str:
        with suppress(grpc.aio.AioRpcError):
            await stream(channel)(timeout=0.002).read()
        return "late"

    async def _streamed(self, channel: grpc.aio.Channel, rng: random.Random) -> str:
        call = stream(channel)(timeout=60)
        for number in range(rng.randrange(1, 20)):
            await call.write(message_with(number))
            answer = await read(call)
            assert np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32)[0] == number
        await call.done_writing()
        return "streamed"


async def run(soak: Soak, pid: int, *, seconds: float, calls: int) -> list[tuple[float, int, float]]:
    """Run turns of calls. Returns the time, the calls so far and the resident MiB after each turn."""
    process = psutil.Process(pid)
    rng = random.Random(0)
    seen: list[tuple[float, int, float]] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds or soak.outcomes.total() < calls:
        await asyncio.gather(asyncio.to_thread(soak.bulk), *(soak.odd(rng) for _ in range(8)))
        now = (time.monotonic() - began, soak.outcomes.total(), process.memory_info().rss / 2**20)
        seen.append(now)
        print(f"{now[0]:6.1f} s {now[1]:9,} calls {now[2]:7.1f} MiB", flush=True)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--calls", type=int, default=5_000_000)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "models" / "identity" / "1").mkdir(parents=True)
        identity(folder / "models" / "identity" / "1" / "model.onnx")
        with serving(folder / "models", PORT, "--grpc-transport=native") as pid:
            soak = Soak(f"127.0.0.1:{PORT + 1}", folder)
            files = psutil.Process(pid).num_fds()
            seen = asyncio.run(run(soak, pid, seconds=60 * options.minutes, calls=options.calls))
            left_files = psutil.Process(pid).num_fds() - files
    later = [mib for _, _, mib in seen[len(seen) * 2 // 3 :]]
    grown = max(later) - seen[len(seen) * 2 // 3 - 1][2] if len(seen) >= 3 else float("nan")
    points = [seen[len(seen) * tenth // 10] for tenth in range(10)] + [seen[-1]]
    write_report(
        options.results / "grpc_soak.md",
        "Soak of the native gRPC transport",
        f"{seen[-1][1]:,} calls in {seen[-1][0] / 60:.1f} minutes: "
        + ", ".join(f"{count:,} {outcome}" for outcome, count in soak.outcomes.items())
        + f". The last third of the run added {grown:.1f} MiB (expected: less than {MAX_GROWTH_MIB:g}); "
        f"{left_files} file descriptors more than at the beginning are open.",
        table(["seconds", "calls", "MiB"], [[f"{s:.0f}", f"{n:,}", f"{mib:.1f}"] for s, n, mib in points]),
    )
    return 0 if grown < MAX_GROWTH_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
