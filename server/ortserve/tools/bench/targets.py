"""Makes the target of a plan, and imports no more than it needs."""

from typing import TYPE_CHECKING

from ortserve.tools.bench.plans import GrpcPlan, HttpPlan, Plan
from ortserve.tools.bench.target import Target

if TYPE_CHECKING:
    from ortserve.tools.bench.in_process import BareRuns


def make_target(plan: Plan) -> "Target | BareRuns":
    """Make the target, in the generator's process.

    The modules are imported here, because those of models take more than a second, which others need not wait for.
    """
    if isinstance(plan, HttpPlan):
        from ortserve.tools.bench.http_client import HttpTarget

        return HttpTarget(plan)
    if isinstance(plan, GrpcPlan):
        from ortserve.tools.bench.grpc_client import GrpcTarget

        return GrpcTarget(plan)
    from ortserve.tools.bench.in_process import BareRuns, BatcherTarget

    return BatcherTarget(plan) if plan.way == "batcher" else BareRuns(plan)
