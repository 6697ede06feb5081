"""Log lines about the progress of fetches from a store."""

import pytest

from fakes.clock import FakeClock
from ortserve.registry.stores.fetch import FetchProgress

S = 10**9


def test_long_fetches_are_reported_every_ten_seconds_and_at_the_end_of_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = FakeClock()
    progress = FetchProgress("s3://models", clock)
    for _ in range(2):
        progress.begin(100_000_000)
    clock.advance(10 * S - 1)
    progress.add(1_000_000)
    assert caplog.messages == []
    clock.advance(1)
    progress.add(1_000_000)
    progress.add(1_000_000)
    assert caplog.messages == ["models are being fetched"]
    progress.end()
    assert caplog.messages == ["models are being fetched"]
    progress.end()
    assert caplog.messages == ["models are being fetched", "models were fetched"]
    assert progress.total_bytes == 3_000_000
    progress.begin(1)
    progress.end()
    assert len(caplog.messages) == 2, "a short fetch was reported"
