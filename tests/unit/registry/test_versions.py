"""Loading one version on a thread, with the real ONNX Runtime, while the event loop runs."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from held_files import held_file
from models import builders
from ortserve.config.model import LoadOptions
from ortserve.registry.catalog import Catalog, State, VersionRecord
from ortserve.registry.draining import Draining
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.repository.source import read_source
from ortserve.registry.residency.ledger import HostLedger
from ortserve.registry.residency.memory_room import MemoryRoom
from ortserve.registry.version_loader import VersionLoader
from ortserve.registry.versions import Versions
from ortserve.telemetry.metrics import Metrics

WAITING_FOR_FILE = "waiting for its file, for 0 s"


class Lines(logging.Handler):
    """Records the fields of log lines, and lets the loop wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "model is still loading":
            self.fields.put_nowait(vars(record)["fields"])


async def test_long_load_is_logged_until_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = LoadOptions.model_validate({"warmup_s": 0, "intra_op_threads": 1})
    file = builders.identity(tmp_path / "m.onnx")
    source = read_source("m", [tmp_path], options)
    assert source is not None
    before = asyncio.all_tasks()
    record = VersionRecord("m", 1, lambda: None, source=source.versions[1])
    metrics = Metrics(CollectorRegistry())
    catalog, ledger = Catalog(), HostLedger()
    draining = Draining(catalog, ledger, metrics)
    room = MemoryRoom(catalog, ledger, draining, lambda: 0, metrics.residency)
    assembly = Assembly(asyncio.get_running_loop(), lambda: 0, processors=1)
    loader = VersionLoader(catalog, ledger, assembly, lambda: 0, progress_log_interval_s=0.001)
    versions = Versions(catalog, room, loader, draining, metrics, lambda: 0)
    lines = Lines()
    with held_file(file) as hold, caplog.at_level(logging.INFO):
        logging.getLogger("ortserve.registry.version_loader").addHandler(lines)
        try:
            loading = asyncio.create_task(versions.load(record))
            while (fields := await lines.fields.get())["doing"] != WAITING_FOR_FILE:
                pass
            assert fields == {"model": "m", "version": 1, "doing": WAITING_FOR_FILE, "seconds": 0.0}
            assert (record.state, record.explanation) == (State.LOADING, WAITING_FOR_FILE)
            hold.release()
            assert await loading == ""
        finally:
            logging.getLogger("ortserve.registry.version_loader").removeHandler(lines)
    assert (record.state, record.explanation) == (State.READY, "")
    await draining.close()
    loader.close()
    # All tasks of the load have ended; otherwise they would log forever.
    await asyncio.wait_for(asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True), 30)
