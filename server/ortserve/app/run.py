"""The process: its settings, its signals, and a server from its start to its end."""

import asyncio
import logging
import os
import sys
from typing import Final, NoReturn

import uvloop

from ortserve.app.server import Server
from ortserve.app.stop_signals import catch_stop_signals
from ortserve.config.options import ServerOptions
from ortserve.engine.process_limits import limit_malloc_arenas
from ortserve.errors import ServeError
from ortserve.telemetry.logs import LogSwitches, configure_logging, log_event

logger: Final = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.00005
"""How long the event loop may keep the interpreter lock while a worker waits for it. At Python's 5 ms a worker stood
0.8 ms behind the answers of its last batch before it could begin the next, and fewer rows a second were served
(``loadtests/batched_compute.py``). Where runs happen on the loop itself nobody waits for it."""


def run(options: ServerOptions) -> int:
    """Serve until SIGTERM or SIGINT, then drain and end the process with status 0. A second signal ends it at once.

    Returns:
        The exit status: 1 when the server could not start.
    """
    limit_malloc_arenas()
    switches = configure_logging(options.log_level, options.log_format)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(options, switches))
        except ServeError as error:
            log_event(logger, logging.ERROR, "the server cannot start", reason=error.message)
            return 1


async def _serve(options: ServerOptions, switches: LogSwitches) -> NoReturn:
    server = Server(options, switches)
    asked_to_stop = catch_stop_signals(asyncio.get_running_loop())
    try:
        await server.start()
        loading = asyncio.create_task(server.load(), name="load")
        stopping = asyncio.create_task(asked_to_stop.wait(), name="signals")
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # a repository that cannot be read ends the server
        watching = asyncio.create_task(server.watch(), name="watch")
        await stopping
        loading.cancel()
        watching.cancel()
        is_whole = await server.drain()
    finally:
        await server.stop()
    # Not by way of the interpreter's end, which would wait for a load, or a run, as long as it takes.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0 if is_whole else 1)
