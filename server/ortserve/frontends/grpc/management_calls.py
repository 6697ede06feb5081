"""RPCs that manage the server: its repository, statistics, settings, and regions of shared memory."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from google.protobuf.message import Message

from ortserve._pb import management_pb2 as pb
from ortserve._pb import shared_memory_pb2 as memory_pb
from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.grpc_infer import require_version
from ortserve.codecs.grpc_load import parse_load
from ortserve.codecs.json_text import LoadParameter
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, answering, awaiting, awaiting_bytes
from ortserve.service.gate import BodyAdmission, Reservation
from ortserve.service.management import Management, ModelStatistics, Setting
from ortserve.service.shared_memory import CudaRegionStatus, RegionStatus, SharedMemory
from ortserve.telemetry.statistics import BatchSizeStatistics, Duration, InferStatistics


class ManagementCalls:
    """Handlers of the RPCs about the repository, the statistics, and the trace and log settings."""

    service = SERVICE_NAME

    def __init__(self, management: Management, admission: BodyAdmission) -> None:
        """``admission`` admits the messages of load calls."""
        self._repository = management.repository
        self._statistics = management.statistics
        self._logs = management.logs
        self._traces = management.traces
        self._admission = admission

    def handlers(self) -> Handlers:
        return {
            "RepositoryIndex": awaiting(pb.RepositoryIndexRequest, self._index),
            "RepositoryModelLoad": awaiting_bytes(self._load),
            "RepositoryModelUnload": awaiting(pb.RepositoryModelUnloadRequest, self._unload),
            "ModelStatistics": awaiting(pb.ModelStatisticsRequest, self._model_statistics),
            "TraceSetting": answering(pb.TraceSettingRequest, self._trace_setting),
            "LogSettings": answering(pb.LogSettingsRequest, self._log_settings),
        }

    async def _index(self, request: pb.RepositoryIndexRequest) -> Message:
        _require_no_repository(request.repository_name)
        response = pb.RepositoryIndexResponse()
        async for entry in self._repository.index(only_ready=request.ready):
            response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response

    async def _load(self, data: bytes | memoryview) -> Message:
        reservation = self._admission.reserve(len(data))
        loading = asyncio.get_running_loop().create_task(self._parse_and_load(data))
        loading.add_done_callback(partial(_end_load, reservation))
        await asyncio.shield(loading)  # A load goes on without its caller, and keeps the files in the message.
        return pb.RepositoryModelLoadResponse()

    async def _parse_and_load(self, data: bytes | memoryview) -> None:
        is_short = len(data) <= INLINE_BYTES
        request, parameters = _parse_load(data) if is_short else await asyncio.to_thread(_parse_load, data)
        _require_no_repository(request.repository_name)
        await self._repository.load(request.model_name, parameters)

    async def _unload(self, request: pb.RepositoryModelUnloadRequest) -> Message:
        _require_no_repository(request.repository_name)
        await self._repository.unload(request.model_name, _parameters(request.parameters))
        return pb.RepositoryModelUnloadResponse()

    async def _model_statistics(self, request: pb.ModelStatisticsRequest) -> bytes:
        require_version(request.version)
        # Messages of one entry each, joined, are the message of all entries. All together would hold up the loop.
        parts = [
            pb.ModelStatisticsResponse(model_stats=[_model_statistics(one)]).SerializeToString()
            async for one in self._statistics.statistics(request.name, request.version)
        ]
        return b"".join(parts)

    def _trace_setting(self, request: pb.TraceSettingRequest) -> Message:
        given = {key: list(setting.value) for key, setting in request.settings.items()}
        changes = {key: values[0] if len(values) == 1 else values for key, values in given.items()}
        settings = self._traces.update(changes, request.model_name)
        return pb.TraceSettingResponse(
            settings={
                key: pb.TraceSettingResponse.SettingValue(value=[value] if isinstance(value, str) else value)
                for key, value in settings.items()
            }
        )

    def _log_settings(self, request: pb.LogSettingsRequest) -> Message:
        changes = {key: _requested(setting) for key, setting in request.settings.items()}
        settings = self._logs.update(changes)
        return pb.LogSettingsResponse(settings={key: _setting(value) for key, value in settings.items()})


class SharedMemoryCalls:
    """Handlers of the RPCs that register, unregister and list regions of shared memory."""

    service = SERVICE_NAME

    def __init__(self, regions: SharedMemory) -> None:
        self._regions = regions

    def handlers(self) -> Handlers:
        return {
            "SystemSharedMemoryStatus": awaiting(memory_pb.SystemSharedMemoryStatusRequest, self._system_status),
            "SystemSharedMemoryRegister": answering(memory_pb.SystemSharedMemoryRegisterRequest, self._register_system),
            "SystemSharedMemoryUnregister": answering(
                memory_pb.SystemSharedMemoryUnregisterRequest, self._unregister_system
            ),
            "CudaSharedMemoryStatus": answering(memory_pb.CudaSharedMemoryStatusRequest, self._cuda_status),
            "CudaSharedMemoryRegister": awaiting(memory_pb.CudaSharedMemoryRegisterRequest, self._register_cuda),
            "CudaSharedMemoryUnregister": answering(memory_pb.CudaSharedMemoryUnregisterRequest, self._unregister_cuda),
        }

    async def _system_status(self, request: memory_pb.SystemSharedMemoryStatusRequest) -> Message:
        # On a thread, because there may be thousands of regions.
        return await asyncio.to_thread(_system_regions, self._regions.status(RegionStatus, request.name))

    def _register_system(self, request: memory_pb.SystemSharedMemoryRegisterRequest) -> Message:
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return memory_pb.SystemSharedMemoryRegisterResponse()

    def _unregister_system(self, request: memory_pb.SystemSharedMemoryUnregisterRequest) -> Message:
        self._regions.unregister(RegionStatus, request.name)
        return memory_pb.SystemSharedMemoryUnregisterResponse()

    def _cuda_status(self, request: memory_pb.CudaSharedMemoryStatusRequest) -> Message:
        response = memory_pb.CudaSharedMemoryStatusResponse()
        for known in self._regions.status(CudaRegionStatus, request.name):
            entry = response.regions[known.name]
            entry.name, entry.device_id, entry.byte_size = known.name, known.device_id, known.byte_size
        return response

    async def _register_cuda(self, request: memory_pb.CudaSharedMemoryRegisterRequest) -> Message:
        await self._regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return memory_pb.CudaSharedMemoryRegisterResponse()

    def _unregister_cuda(self, request: memory_pb.CudaSharedMemoryUnregisterRequest) -> Message:
        self._regions.unregister(CudaRegionStatus, request.name)
        return memory_pb.CudaSharedMemoryUnregisterResponse()


def _system_regions(known: Sequence[RegionStatus]) -> Message:
    response = memory_pb.SystemSharedMemoryStatusResponse()
    for region in known:
        entry = response.regions[region.name]
        entry.name, entry.key, entry.offset, entry.byte_size = region.name, region.key, region.offset, region.byte_size
    return response


def _require_no_repository(name: str) -> None:
    if name:
        raise ServeError(ErrorKind.UNSUPPORTED, "'repository_name' specification is not supported")


def _end_load(reservation: Reservation, loading: asyncio.Task[None]) -> None:
    reservation.release()
    if not loading.cancelled():
        loading.exception()  # retrieved here in case the caller has left; asyncio would log it otherwise


def _parse_load(data: bytes | memoryview) -> tuple[pb.RepositoryModelLoadRequest, dict[str, LoadParameter]]:
    """Return a load request and its parameters. Raises ServeError: invalid_input."""
    request, files = parse_load(data)
    return request, {**_parameters(request.parameters), **files}


def _parameters(given: Mapping[str, pb.ModelRepositoryParameter]) -> dict[str, LoadParameter]:
    """Return the values by name. Raises ServeError: invalid_input for a parameter without a value."""
    parameters: dict[str, LoadParameter] = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise invalid_input(f"parameter '{name}': expected a value, got none")
        parameters[name] = getattr(parameter, kind)
    return parameters


def _model_statistics(one: ModelStatistics) -> pb.ModelStatistics:
    numbers = one.version
    return pb.ModelStatistics(
        name=numbers.name,
        version=numbers.version,
        last_inference=one.last_inference_ms,
        inference_count=numbers.inference_count,
        execution_count=numbers.execution_count,
        # The fields of the records have the names of the protocol.
        inference_stats=pb.InferStatistics(**_fields(numbers.inference)),
        batch_stats=[pb.InferBatchStatistics(**_fields(batch)) for batch in numbers.batches],
    )


def _fields(record: InferStatistics | BatchSizeStatistics) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {
        name: pb.StatisticDuration(count=value.count, ns=value.ns) if isinstance(value, Duration) else value
        for name, value in values.items()
    }


def _requested(setting: pb.LogSettingsRequest.SettingValue) -> object:
    """Return the new value of a setting; None leaves the setting unchanged."""
    kind = setting.WhichOneof("parameter_choice")
    return None if kind is None else getattr(setting, kind)


def _setting(value: Setting) -> pb.LogSettingsResponse.SettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponse.SettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponse.SettingValue(uint32_param=value)
    return pb.LogSettingsResponse.SettingValue(string_param=value)
