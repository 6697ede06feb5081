"""The limits of a loaded model's batches, by its options and the results of warm-up; and how serving corrects them."""

from collections.abc import Callable
from dataclasses import replace

from ortserve.batching.planner import BatchPolicy
from ortserve.batching.row_checks import RowChecks
from ortserve.batching.row_limit import RowLimit
from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.engine.provider_options import GPU_PROVIDERS
from ortserve.registry.load.batch_sizes import MAX_SWEPT_ROWS
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.row_axes import Grounds


def batch_policy(loaded: LoadedModel, options: ModelOptions) -> BatchPolicy:
    """The limits of batches when serving begins."""
    if not loaded.signature.is_batched:
        return BatchPolicy(1)
    max_rows, buckets = loaded.warm_up.max_rows, tuple(sorted(set(options.buckets))) or loaded.on_device.sizes
    if options.sequences is not None and options.sequences.strategy == "direct":
        # The strategy forms batches before they are enqueued. Models may keep track of the places of rows.
        return BatchPolicy(max_rows, buckets=buckets, keeps_places=loaded.rows.grounds is not Grounds.PROVEN)
    return BatchPolicy(
        max_rows,
        int(options.queue_delay_s * 1e9),
        tuple(sorted(options.preferred_rows)),
        buckets,
        options.closed_loop_wait,
        has_long_pieces=_may_exceed_batches(loaded, options),
    )


def row_limit(loaded: LoadedModel, options: ModelOptions, on_change: Callable[[int], object]) -> RowLimit | None:
    """Corrects the maximum rows that warm-up found; None to keep it. ``on_change`` is called with each new one."""
    return RowLimit(MAX_SWEPT_ROWS, on_change) if _is_corrected(loaded, options) else None


def row_checks(loaded: LoadedModel, options: ModelOptions, clock: Clock) -> RowChecks | None:
    """The row checks of a model. None if they are off by configuration, or by default because rows are proven
    independent; also if requests run alone or batches always have one row.
    """
    is_checked = options.row_checks
    if is_checked is None:
        is_checked = loaded.rows.grounds is not Grounds.PROVEN
    if not is_checked or not loaded.signature.is_batched:
        return None
    if loaded.warm_up.max_rows == 1 and not _is_corrected(loaded, options):
        return None
    signature, tensors = loaded.signature, loaded.interface.sequences
    if tensors is not None and tensors.are_elsewhere:  # the other outputs are states, which cannot be compared
        signature = replace(signature, outputs=signature.outputs[: tensors.shown_outputs])
    return RowChecks(signature, clock, is_coarse=loaded.execution_provider in GPU_PROVIDERS)


def _may_exceed_batches(loaded: LoadedModel, options: ModelOptions) -> bool:
    """Whether one request may run with more rows than a batch."""
    return (
        loaded.rows.grounds is Grounds.PROVEN
        and loaded.padding is None
        and all(spec.datatype is not DataType.BYTES for spec in loaded.signature.inputs)
        and _is_limited_by_time(loaded, options)
    )


def _is_corrected(loaded: LoadedModel, options: ModelOptions) -> bool:
    has_delay = options.queue_delay_s > 0 or options.preferred_rows
    return not has_delay and _is_limited_by_time(loaded, options)


def _is_limited_by_time(loaded: LoadedModel, options: ModelOptions) -> bool:
    """Whether nothing but the time of runs limits the rows of a batch: neither the configuration nor memory."""
    return (
        loaded.signature.is_batched
        and options.max_rows is None
        and not options.buckets
        and options.sequences is None
        and not loaded.warm_up.no_memory
        and loaded.signature.ragged is None
        and all(instance.runs_on_host for instance in loaded.instances)
    )
