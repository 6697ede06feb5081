"""How many threads a run of a model uses inside an operator: as configured, or by how short its runs are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.engine.process_limits import cpu_budget, intra_op_threads
from ortserve.engine.provider_options import CPU, GPU_PROVIDERS
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import affinities_key
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import model_nbytes
from ortserve.registry.size_timer import SizeLatency

ONE_THREAD_BELOW_NS: Final = 1_000_000
"""A run of one row shorter than this gains less from a second thread than waking it costs."""
_FEW_WEIGHTS_NBYTES: Final = 4 * 1024**2


class RunThreads:
    """Chooses the number of threads for the sessions of one load."""

    def __init__(self, path: Path, model: Model, options: ModelOptions, *, has_global_threads: bool) -> None:
        """``has_global_threads`` says whether all sessions of the process share their threads."""
        self._path = path
        self._model = model
        self._options = options
        self._has_global_threads = has_global_threads
        session = options.session
        self.branches: Final = session.inter_op_threads if session.execution_mode == "parallel" else 1
        """Operators that may run beside each other."""

    def usual(self, choice: ProviderChoice) -> int:
        """Before it is known how short runs are."""
        if self._has_global_threads:
            return cpu_budget()
        if self._options.intra_op_threads is not None:
            return self._options.intra_op_threads
        return intra_op_threads(cpu_budget(), on_gpu=choice.name in GPU_PROVIDERS, inter_op_threads=self.branches)

    def first(self, choice: ProviderChoice) -> int:
        """In the session that shows how short runs are.

        Runs of a model with few weights are mostly short, and then it need not be opened again.
        """
        usual = self.usual(choice)
        if usual == 1 or choice.name != CPU or not self._options.warmup_s or not self._may_be_one():
            return usual
        return 1 if model_nbytes(self._path, self._model) < _FEW_WEIGHTS_NBYTES else usual

    def wanted(self, choice: ProviderChoice, latencies: Sequence[SizeLatency]) -> int:
        """Once it is known how short runs are, as far as ``latencies`` say."""
        is_short = bool(latencies) and latencies[0].run_ns < ONE_THREAD_BELOW_NS
        return 1 if is_short and self._may_be_one() else self.usual(choice)

    def _may_be_one(self) -> bool:
        """Whether the options leave open how many threads a run uses, and on which processors."""
        options = self._options
        return options.intra_op_threads is None and not affinities_key(options.session) and not self._has_global_threads
