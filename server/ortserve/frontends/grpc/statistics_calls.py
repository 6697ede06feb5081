"""The statistics call of gRPC."""

from google.protobuf.message import Message

from ortserve._pb import management_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message, require_version_number
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, answering
from ortserve.service.statistics import ModelStatistics, StatisticsService
from ortserve.telemetry.statistics import Duration


class StatisticsCalls:
    """Models' numbers."""

    service = SERVICE_NAME

    def __init__(self, statistics: StatisticsService) -> None:
        self._statistics = statistics

    def handlers(self) -> Handlers:
        return {"ModelStatistics": answering(self._model_statistics)}

    def _model_statistics(self, data: bytes) -> Message:
        request = parse_message(pb.ModelStatisticsRequest, data)
        require_version_number(request.version)
        found = self._statistics.statistics(request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[_model(one) for one in found])


def _model(one: ModelStatistics) -> pb.ModelStatistics:
    numbers = one.version
    parts = numbers.inference
    return pb.ModelStatistics(
        name=numbers.name,
        version=numbers.version,
        last_inference=one.last_inference_ms,
        inference_count=numbers.inference_count,
        execution_count=numbers.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(parts.success),
            fail=_duration(parts.fail),
            queue=_duration(parts.queue),
            compute_input=_duration(parts.compute_input),
            compute_infer=_duration(parts.compute_infer),
            compute_output=_duration(parts.compute_output),
            cache_hit=_duration(Duration()),
            cache_miss=_duration(Duration()),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=batch.batch_size,
                compute_input=_duration(batch.compute_input),
                compute_infer=_duration(batch.compute_infer),
                compute_output=_duration(batch.compute_output),
            )
            for batch in numbers.batches
        ],
    )


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)
