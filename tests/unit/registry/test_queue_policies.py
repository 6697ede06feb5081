"""Terms of requests under queue policies."""

import pytest

from ortserve.config.model import ModelOptions
from ortserve.core.inflight import Terms
from ortserve.registry.served_model import has_queue_policies, policy_terms, requests_limits, terms_behind

MS = 1_000_000


def options(**given: object) -> ModelOptions:
    return ModelOptions.model_validate(given)


def test_model_without_configuration_has_no_policies() -> None:
    assert not has_queue_policies(options())
    assert not has_queue_policies(options(queue_policy={}))
    assert has_queue_policies(options(queue_policy={"max_requests": 1}))
    assert has_queue_policies(options(priority_queue_policies={2: {}}))


@pytest.mark.parametrize(
    ("policy", "asked_ns", "start_by_ns"),
    [
        ({"max_requests": 1}, None, None),
        ({"max_requests": 1}, 3 * MS, 1 + 3 * MS),
        ({"timeout_s": 0.005}, None, 1 + 5 * MS),
        ({"timeout_s": 0.005}, 3 * MS, 1 + 3 * MS),
        ({"timeout_s": 0.005}, 9 * MS, 1 + 5 * MS),
        ({"timeout_s": 0.005, "timeout_override": False}, 3 * MS, 1 + 5 * MS),
        ({"timeout_override": False}, 3 * MS, None),
    ],
)
def test_queue_timeout_is_the_policy_or_a_shorter_request_timeout(
    policy: dict[str, object], asked_ns: int | None, start_by_ns: int | None
) -> None:
    terms = policy_terms(options(queue_policy=policy), 1, 1, 7, asked_ns)
    assert (terms.start_by_ns, terms.answer_by_ns, terms.yields_when_late) == (start_by_ns, 7, False)


def test_level_has_its_own_policy_or_the_default() -> None:
    given = options(
        priority_levels=2, queue_policy={"timeout_s": 1}, priority_queue_policies={1: {"timeout_action": "delay"}}
    )
    assert policy_terms(given, 1, 0, None, None).start_by_ns is None
    assert policy_terms(given, 2, 0, None, None).start_by_ns == 10**9


def test_delayed_request_runs_after_its_level_and_before_the_next() -> None:
    given = options(priority_levels=2, queue_policy={"timeout_s": 1, "timeout_action": "delay"})
    first, second = (policy_terms(given, level, 0, 5, None) for level in (1, 2))
    assert first.yields_when_late
    behind = terms_behind(first)
    assert first.level < behind.level < second.level
    assert behind == Terms(behind.level, 5)


def test_request_without_a_timeout_is_never_delayed() -> None:
    given = options(queue_policy={"timeout_action": "delay"})
    assert not policy_terms(given, 1, 0, None, None).yields_when_late


def test_queue_limits_count_timely_requests_of_each_level() -> None:
    given = options(
        priority_levels=3, queue_policy={"max_requests": 8}, priority_queue_policies={1: {"max_requests": 2}, 3: {}}
    )
    levels = {level: policy_terms(given, level, 0, None, None).level for level in (1, 2, 3)}
    assert requests_limits(given) == {levels[1]: 2, levels[2]: 8}
    assert requests_limits(options(queue_policy={"max_requests": 4})) == {1: 4}
    assert requests_limits(options()) == {}
