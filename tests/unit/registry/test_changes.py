"""The times at which a failed load is retried."""

from ortserve.registry.changes import LoadRetries

S = 1_000_000_000


def test_wait_doubles_with_each_failure_up_to_an_hour() -> None:
    retries = LoadRetries()
    now_s = 0
    for wait_s in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        retries.note_failure("m", now_s * S)
        assert not retries.is_due("m", (now_s + wait_s) * S - 1)
        now_s += wait_s
        assert retries.is_due("m", now_s * S)
    assert not retries.is_due("other", now_s * S)


def test_serving_model_is_not_due_and_its_wait_starts_over() -> None:
    retries = LoadRetries()
    retries.note_failure("m", 0)
    retries.note_failure("m", 60 * S)
    retries.forget("m")
    retries.forget("m")
    assert not retries.is_due("m", 10_000 * S)
    retries.note_failure("m", 0)
    assert retries.is_due("m", 60 * S)
