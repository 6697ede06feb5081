"""Finds out why the graphs of a model cannot be captured and replayed on an execution provider."""

from collections.abc import Mapping

from ortserve.device.devices import Devices
from ortserve.device.preparation import TRIAL_FAILED, NoReplay, why_no_replay
from ortserve.engine.provider_options import TENSORRT, most_rows, why_built_anew
from ortserve.engine.providers import ProviderChoice
from ortserve.registry.load.analysed_model import AnalysedModel
from ortserve.registry.load.capture_trial import CaptureTrials, TrialRequest
from ortserve.registry.load.coordination import Progress


class ReplayObstacles:
    """Finds the obstacle to replay of one model, on any of its execution providers. For the thread of the load."""

    def __init__(self, model: AnalysedModel, devices: Devices, trials: CaptureTrials, progress: Progress) -> None:
        self._model = model
        self._devices = devices
        self._trials = trials
        self._progress = progress
        self._tried: dict[str, NoReplay | None] = {}
        """Results of capture trials, by execution provider."""

    def find_in(self, operators: Mapping[str, frozenset[str]], choice: ProviderChoice) -> NoReplay | None:
        """The obstacle that an open session shows, by its operators on each execution provider."""
        settings, provider = self._model.options.session, self._devices.provider(choice.name)
        return why_no_replay(choice.name, operators, settings, shapes_elsewhere=not provider.one_graph_per_session)

    def find_by_trial(self, choice: ProviderChoice, threads: int) -> NoReplay | None:
        """The obstacle in the options of a provider, or that a capture in another process meets."""
        if choice.name == TENSORRT and (because := why_built_anew(choice.options)):
            return NoReplay("builds_anew", f"each graph has a session of its own: {because}")
        if choice.options.get("tunable_op_tuning_enable") == "1":
            return NoReplay(
                "tunes", "tunable_op_tuning_enable tries kernels in runs, and a captured graph cannot change"
            )
        if choice.name not in self._tried:  # the result holds for all devices of the kind
            self._tried[choice.name] = self._try_capture(choice, threads)
        return self._tried[choice.name]

    def _try_capture(self, choice: ProviderChoice, threads: int) -> NoReplay | None:
        options = self._model.options
        # The smallest and a large size suffice, because a capture fails because of nodes rather than sizes.
        sizes = sorted(
            {1, options.max_rows or min(8, most_rows(choice.options) or 8)}
            if not options.buckets
            else {min(options.buckets), max(options.buckets)}
        )
        if self._devices.provider(choice.name).one_graph_per_session:
            sizes = sizes[-1:]  # each size needs a session with its own weights
        self._progress.begin("trying in another process whether graphs can be captured")
        request = TrialRequest(
            self._model.path,
            self._model.name,
            ProviderChoice(choice.name, choice.options),
            threads,
            tuple(sizes),
            options.session,
            self._model.libraries,
            options.batched,
        )
        because = self._trials.why_not(request, self._progress)
        return NoReplay(TRIAL_FAILED, because) if because else None
