"""Runs of a request on a version: on the one that it names, or on the candidate of a rollout first."""

from ortserve.core.batch import Arrays
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import InferRequest
from ortserve.registry.registry import Registry
from ortserve.registry.rollout import Rollout
from ortserve.registry.serving import ServedVersion
from ortserve.service.call import Call
from ortserve.service.validation import check_request, read_scheduling, read_sequence_part


async def try_candidate(
    candidate: str, rollout: Rollout, call: Call, request: InferRequest, registry: Registry
) -> Arrays:
    """Run a request on the candidate of a rollout or, if it fails, on the version that it is tried for."""
    try:
        tried = registry.find(request.model_name, candidate)
        outputs = await run_on(tried, call, request)
        tried.cut_back(outputs, call.inputs)
    except Exception as error:  # noqa: BLE001 - callers never get the failure of a candidate
        failure = error.with_traceback(None)
    else:
        rollout.candidate_answered(call.timing)
        return outputs
    call.timing.taken_ns = 0  # no run of the version has started
    # Found again, because the version may have been replaced meanwhile.
    served = call.served = registry.find(request.model_name, request.model_version)
    outputs = await run_on(served, call, request)
    rollout.candidate_failed(failure)  # not for a request that fails on both
    return outputs


async def run_on(served: ServedVersion, call: Call, request: InferRequest) -> Arrays:
    """Run a request on a version, which then answers the call."""
    inputs, rows = check_request(request, served.signature, served.name)
    run = call.child(inputs, rows)
    submit(run, call, request, served)
    outputs = await run
    call.served, call.inputs, call.rows = served, run.inputs, rows
    return outputs


def submit(run: InflightRequest, call: Call, request: InferRequest, served: ServedVersion) -> None:
    """Submit the run that answers a call, which is the call itself or a child of it.

    Raises:
        ServeError: The version rejects it; invalid_input, for parameters that are malformed.
    """
    scheduling = read_scheduling(request.parameters)
    terms = served.terms(call.timing.received_ns, call.timeout_ns, scheduling, request.outputs)
    if not served.takes_sequences:
        served.submit(run, terms)
    else:
        served.submit_part(run, terms, read_sequence_part(request.parameters, call.protocol))
