"""Profiles for TensorRT: the range of each input's shape for which it builds its engine when the session is opened."""

from collections.abc import Callable
from dataclasses import replace

from ortserve.config.session import SessionSettings
from ortserve.core.signature import ModelSignature
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU, TENSORRT, profile_shapes
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import Session, SessionOptions
from ortserve.errors import ServeError
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.batch_sizes import MAX_SWEPT_ROWS
from ortserve.registry.load.coordination import Progress
from ortserve.registry.load.row_trial import MIN_ROWS


class TensorrtProfiles:
    """The profiles of one model. For the thread of the load."""

    def __init__(self, model: AnalysedModel, progress: Progress) -> None:
        self._model = model
        self._progress = progress
        self._has_none = model.options.is_ragged  # No profile bounds the sizes to which requests are joined.
        self._signature: ModelSignature | None = None
        """The signature of a session on the CPU; None before it is needed."""

    def add_to(self, choice: ProviderChoice, open_file: Callable[[SessionOptions], Session]) -> ProviderChoice:
        """Add a profile of the batch sizes to a choice of TensorRT. Returns other choices as they are.

        Without a profile, TensorRT learns the shapes from the runs, and builds its engine again for new ones.
        """
        if choice.name != TENSORRT or self._has_none:
            return choice
        if self._signature is None:
            self._progress.begin("reading the shapes for which TensorRT builds its engine")
            unoptimized = SessionOptions(ProviderChoice(CPU), 1, SessionSettings(graph_optimization="none"))
            try:
                session = open_file(unoptimized)
                self._signature = self._model.rows.apply(read_signature(session, self._model.content))
            except ServeError:  # TensorRT supports models that the CPU does not
                self.give_up()
                return choice
        options = self._model.options
        most = options.buckets or (options.max_rows or MAX_SWEPT_ROWS,)
        sizes = (1, MIN_ROWS, *most)  # warm-up runs are not padded
        shapes = profile_shapes(self._signature, sizes, choice.options)
        return replace(choice, options={**choice.options, **shapes}) if shapes else choice

    def give_up(self) -> None:
        """Add no profile from now on, because the model cannot be read on the CPU, or TensorRT has only a part of it.

        TensorRT would then want profiles of inner tensors, too.
        """
        self._has_none = True
