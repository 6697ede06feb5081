"""How the sessions of an execution provider use its devices: what they are told, and how they keep captured graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ortserve.engine.device.cuda import CudaDevice
from ortserve.engine.device.protocol import Device
from ortserve.engine.provider_options import CUDA, TENSORRT

MakeDevice: TypeAlias = Callable[[int], Device]
"""Makes the device of a number."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What is to be known of an execution provider whose sessions run on buffers of a device.

    Attributes:
        make: Makes its devices. Providers that share this share the devices.
        stream_option: The provider's option for the stream that it shall compute on; empty where it has none.
        capture_option: The one for a session that captures graphs; empty where there is none.
        no_and_yes: How the provider spells its value.
        options: Others that it is to be told.
        one_graph_a_session: A session that captures keeps a single graph and replays it in every run, whatever id the
            run has. So it needs a session for each graph, and another for all else.
    """

    make: MakeDevice
    stream_option: str = ""
    capture_option: str = ""
    no_and_yes: tuple[str, str] = ("0", "1")
    options: Mapping[str, str] = field(default_factory=dict)
    one_graph_a_session: bool = False

    def provider_options(self, stream: int, *, captures: bool) -> dict[str, str]:
        """What the provider of a session is to be told so that ``Device.run`` may be used.

        Args:
            stream: The session's compute stream.
            captures: Whether the session captures graphs.
        """
        told = dict(self.options)
        if self.stream_option:
            told[self.stream_option] = str(stream)
        if self.capture_option:
            told[self.capture_option] = self.no_and_yes[captures]
        return told


DEVICE_USES: Final[Mapping[str, DeviceUse]] = {
    CUDA: DeviceUse(
        CudaDevice,
        "user_compute_stream",
        "enable_cuda_graph",
        options={
            "do_copy_in_default_stream": "1"
        },  # 0 can race (microsoft/onnxruntime#4829), and has nothing to copy here
    ),
    # Its provider (1.31.1) does not read ``gpu_graph_id``.
    TENSORRT: DeviceUse(
        CudaDevice, "user_compute_stream", "trt_cuda_graph_enable", ("false", "true"), one_graph_a_session=True
    ),
}
"""By execution provider, in full."""
