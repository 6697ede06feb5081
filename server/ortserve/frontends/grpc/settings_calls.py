"""The trace and log settings of gRPC."""

from google.protobuf.message import Message

from ortserve._pb import management_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, answering
from ortserve.service.log_settings import LogSettings, Setting
from ortserve.service.trace_settings import TraceSettings


class SettingsCalls:
    """What clients may change while the server runs."""

    service = SERVICE_NAME

    def __init__(self, logs: LogSettings, traces: TraceSettings) -> None:
        self._logs = logs
        self._traces = traces

    def handlers(self) -> Handlers:
        return {
            "TraceSetting": answering(self._trace_setting),
            "LogSettings": answering(self._log_settings),
        }

    def _trace_setting(self, data: bytes) -> Message:
        request = parse_message(pb.TraceSettingRequest, data)
        changes = {key: _one_or_all(list(setting.value)) for key, setting in request.settings.items()}
        settings = self._traces.update(changes, request.model_name)
        return pb.TraceSettingResponse(
            settings={
                key: pb.TraceSettingResponse.SettingValue(value=[value] if isinstance(value, str) else value)
                for key, value in settings.items()
            }
        )

    def _log_settings(self, data: bytes) -> Message:
        request = parse_message(pb.LogSettingsRequest, data)
        changes = {key: _chosen(setting) for key, setting in request.settings.items()}
        settings = self._logs.update(changes)
        return pb.LogSettingsResponse(settings={key: _setting(value) for key, value in settings.items()})


def _one_or_all(values: list[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else values


def _chosen(setting: pb.LogSettingsRequest.SettingValue) -> object:
    kind = setting.WhichOneof("parameter_choice")
    return None if kind is None else getattr(setting, kind)


def _setting(value: Setting) -> pb.LogSettingsResponse.SettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponse.SettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponse.SettingValue(uint32_param=value)
    return pb.LogSettingsResponse.SettingValue(string_param=value)
