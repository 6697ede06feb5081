"""The autoscaling signal of a real server is above 1 under overload, and lower again afterwards."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from encodings_of_requests import rest_json
from models import builders
from servers import LONG_S, add_model, json_input, read_metrics, rest_url, serving, wait_for_sample

ROW = np.zeros((1, 4), np.float32)
CALLERS = 16
REQUESTS = 160


def test_saturation_passes_1_under_overload_and_falls_afterwards(tmp_path: Path) -> None:
    # A run takes about 50 ms: 20 rows per second, while 160 arrive at once.
    add_model(tmp_path, "slow", builders.slow, steps=15_000)
    (tmp_path / "slow" / "model.yaml").write_text("max_rows: 1\nmax_queue_rows: 2\n")
    labels = {"model": "slow", "version": "1"}
    with serving(tmp_path, "--warmup-s", "0") as server, ThreadPoolExecutor(CALLERS) as pool:
        rest_json(server, "slow", {"x": ROW})
        calm = wait_for_sample(server, "ortserve_saturation", lambda found: found < 1, **labels)
        document = {"inputs": [json_input("x", ROW)]}

        def ask(_: int) -> int:
            return httpx.post(rest_url(server, "slow"), json=document, timeout=LONG_S).status_code

        statuses = list(pool.map(ask, range(REQUESTS)))
        assert set(statuses) == {200, 429}
        assert statuses.count(429) > REQUESTS / 2  # rejected requests count as offered
        peak = wait_for_sample(server, "ortserve_saturation", lambda found: found > 1, **labels)
        after = peak
        while after >= 0.8:
            time.sleep(1.1)  # the rate decays each second, and only when requests arrive
            rest_json(server, "slow", {"x": ROW})
            after = read_metrics(server).value("ortserve_saturation", **labels)
        learned = httpx.get(f"http://{server.http}/v2/models/slow/batching", timeout=LONG_S).json()
    assert calm < 1 < peak
    assert 0 < after < 0.8
    assert 0 < learned["saturation"] <= after
