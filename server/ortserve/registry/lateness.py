"""What a model's queue policies make of a request: how long it may wait, and where it goes when it has.

Where a model has such policies, the batcher is told two levels for each priority level: the first for those in time,
the second for those who waited too long and have let the others go first.
"""

from dataclasses import replace

from ortserve.config.model import ModelOptions, QueuePolicy
from ortserve.core.terms import Terms


def has_queue_policies(options: ModelOptions) -> bool:
    """Whether there are any but those that every model has."""
    return bool(options.priority_queue_policies) or options.queue_policy != QueuePolicy()


def policy_terms(
    options: ModelOptions, level: int, received_ns: int, finish_by_ns: int | None, asked_ns: int | None
) -> Terms:
    """The terms of a request of a model with queue policies.

    Args:
        options: Of the model.
        level: Of the request, 1 first.
        received_ns: What its wait counts from (monotonic).
        finish_by_ns: When its answer is of no use any more.
        asked_ns: How long it is ready to wait in the queue; it is heard where the policy lets it be, and asks for less.
    """
    policy = options.priority_queue_policies.get(level, options.queue_policy)
    wait_ns = None if policy.timeout_s is None else int(policy.timeout_s * 1e9)
    if asked_ns is not None and policy.timeout_override:
        wait_ns = asked_ns if wait_ns is None else min(asked_ns, wait_ns)
    start_by_ns = None if wait_ns is None else received_ns + wait_ns
    return Terms(2 * level - 1, finish_by_ns, start_by_ns, start_by_ns is not None and policy.timeout_action == "delay")


def terms_behind(terms: Terms) -> Terms:
    """Those of a request that has waited too long, and now goes behind everybody of its level who has not."""
    return replace(terms, level=terms.level + 1, start_by_ns=None, yields_when_late=False)


def requests_limits(options: ModelOptions) -> dict[int, int]:
    """How many requests may wait, by the level that the batcher knows."""
    if not has_queue_policies(options):
        return {}
    # The usual level, too, where a model has a policy but no levels.
    levels = {*range(1, options.priority_levels + 1), options.default_priority_level}
    policies = {level: options.priority_queue_policies.get(level, options.queue_policy) for level in levels}
    return {2 * level - 1: policy.max_requests for level, policy in policies.items() if policy.max_requests is not None}
