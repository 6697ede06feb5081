"""Resolves the options of a model against an open session: its signatures, padding and configured samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from ortserve.core.padding import Padding
from ortserve.engine.model_signature import read_signature
from ortserve.engine.placement import Placement, count_operators
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.inputs import Sample, make_samples
from ortserve.registry.load.interface import Interface, resolve_interface, resolve_padding
from ortserve.registry.load.session_opener import OpenedSession


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The facts about a model that hold for all its sessions.

    Attributes:
        interface: Interface before warm-up. Warm-up may find that requests must run alone.
        padding: Padding of batches; None if batches are never padded.
        samples: Configured samples in the form of ``interface``.
        operators: Operators by execution provider, as the session places them.
    """

    interface: Interface
    padding: Padding | None
    samples: Sequence[Sample]
    operators: Placement


def resolve_model(model: AnalysedModel, opened: OpenedSession, *, max_rows: int | None) -> ResolvedModel:
    """Read the signature of a session, and check and apply the options to it. Blocks on the files of samples.

    ``max_rows`` is the maximum number of rows of a batch; None for no limit.

    Raises:
        ServeError: The model cannot be served, or the options do not match it.
    """
    options = model.options
    served = options.served_outputs
    if served and options.sequences is not None:
        served = (*served, *(state.output for state in options.sequences.states))
    own = model.rows.apply(read_signature(opened.session, model.content, served_outputs=served))
    if options.pad or options.buckets:
        own = own.without_optional_whole("it is the same for all rows, and batches of the model are padded")
    interface = resolve_interface(options, own, model.folder)
    padding = resolve_padding(options, interface.model)
    samples = make_samples(options, interface, model.folder, max_rows=max_rows)
    return ResolvedModel(interface, padding, samples, count_operators(opened.session))
