"""Whether and when this process may poll: the option, the CPU quotas, and other work that needs the processors."""

import asyncio

from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.engine.process_limits import Throttling, cpu_quotas
from ortserve.registry.registry import Registry
from ortserve.service.busy_polling import BusyPolling, PollPolicy


def make_busy_polling(options: ServerOptions, registry: Registry) -> BusyPolling | None:
    """The busy polling of the event loop; None if the loop always sleeps between requests."""
    max_ns = options.busy_poll_us * 1000
    if max_ns == 0 or options.grpc_transport == "grpcio":
        return None
    quotas = cpu_quotas()
    throttling = Throttling([quota.folder / "cpu.stat" for quota in quotas], monotonic_ns())

    def may_poll(now_ns: int) -> bool:
        return not registry.is_changing and not throttling.is_recent(now_ns)

    return BusyPolling(asyncio.get_running_loop(), monotonic_ns, PollPolicy(max_ns), may_poll)
