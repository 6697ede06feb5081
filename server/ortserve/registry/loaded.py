"""What a load of a model has made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.device.instance import DeviceInstance
from ortserve.engine.instance import Instance
from ortserve.engine.placement import Placement, total_nodes
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.zip_maps import Classes
from ortserve.registry.device_batches import DeviceBatches
from ortserve.registry.interface import Interface
from ortserve.registry.row_axes import RowAxes
from ortserve.registry.warmup import WarmUp


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Warm instances, what they take and give, and what was found out about them.

    Attributes:
        rows: Along which axes they run together, and why that is believed.
        providers: The execution provider, and why others were passed over.
        operators: Nodes of the graph, by the execution provider that runs them and by operator.
        intra_op_threads: Threads of a run inside an operator.
        run_threads: Threads that a run may keep busy in all.
        labels: Names of the elements of an output, by its name; its classes where none are configured.
        classes: Of each output that is a sequence of maps in the file, by its name.
        on_device: What runs on buffers of a device.
        unbounded_because: Why the number of rows does not bound the time of a run; empty where it does.
        placed: On which device each instance was placed; empty where all are on the execution provider's.
    """

    instances: tuple[Instance | DeviceInstance, ...]
    interface: Interface
    rows: RowAxes
    warm_up: WarmUp
    providers: ProviderChoice
    operators: Placement
    intra_op_threads: int
    run_threads: int
    padding: Padding | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_device: DeviceBatches = field(default_factory=DeviceBatches)
    placed: tuple[int, ...] = ()
    unbounded_because: str = ""
    classes: Mapping[str, Classes] = field(default_factory=dict)

    @property
    def nodes(self) -> Mapping[str, int]:
        """Of the graph, by execution provider."""
        return total_nodes(self.operators)

    @property
    def signature(self) -> ModelSignature:
        """What the instances take and give."""
        return self.interface.model

    @property
    def execution_provider(self) -> str:
        """The one that was chosen, in full."""
        return self.providers.name

    @property
    def device_ids(self) -> tuple[int, ...]:
        """For each instance, which of the devices of its kind the execution provider uses."""
        return self.placed or (self.providers.device_id,) * len(self.instances)
