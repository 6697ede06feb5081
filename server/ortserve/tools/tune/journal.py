"""The journal of a search: all trials in a file, so that an interrupted search can continue."""

import fcntl
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import optuna
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from pydantic import TypeAdapter

from ortserve.errors import invalid_input
from ortserve.tools.staging import naming
from ortserve.tools.tune.result import Trial
from ortserve.tools.tune.space import Parameter, Point

Key: TypeAlias = frozenset[tuple[str, int]]

_BEGINNING: Final = b'{"op_code":'
_SUBJECT: Final = "subject"
_TRIAL: Final = "trial"
_FORM_OF_TRIALS: Final = TypeAdapter(Trial)
_SEED: Final = 1
_RANDOM_TRIALS: Final = 6
"""Trials before the sampler learns from earlier ones. Trials of enqueued points count, too."""


class Journal:
    """The trials of one search. Only one process at a time may use it."""

    def __init__(self, study: optuna.Study, space: Sequence[Parameter]) -> None:
        """Continue a study. Interrupted trials count as failed, and ``ask`` proposes their points again first."""
        self._study = study
        self._space = space
        self._asked: optuna.Trial | None = None
        self.trials: Final[dict[Key, Trial]] = {}
        """Trials by the ``key_of`` of their points."""
        for one in study.get_trials(deepcopy=False):
            if one.state is TrialState.RUNNING:
                study.tell(one.number, state=TrialState.FAIL)
                study.enqueue_trial(one.params, skip_if_exists=False)
            elif text := one.user_attrs.get(_TRIAL):
                self.trials[key_of(self._point(one.params))] = _FORM_OF_TRIALS.validate_json(text)

    def enqueue(self, point: Point) -> None:
        """Enqueue a point for ``ask``, behind those that are enqueued already."""
        params = {parameter.name: point.get(parameter.name, 0) for parameter in self._space}
        self._study.enqueue_trial(params, skip_if_exists=not point)

    def ask(self) -> Point:
        """The point of a new trial: an enqueued one, or a proposal of the sampler."""
        trial = self._asked = self._study.ask()
        chosen = {one.name: trial.suggest_categorical(one.name, range(len(one.choices))) for one in self._space}
        return self._point(chosen)

    def tell(self, point: Point, trial: Trial, value: float | None) -> None:
        """Record the result of the point that ``ask`` returned. A larger ``value`` is better; None is a failure."""
        assert self._asked is not None
        self.trials[key_of(point)] = trial
        self._asked.set_user_attr(_TRIAL, _FORM_OF_TRIALS.dump_json(trial).decode())
        if value is None:
            self._study.tell(self._asked, state=TrialState.FAIL)
        else:
            self._study.tell(self._asked, value)

    @staticmethod
    def _point(params: Any) -> Point:
        return {name: int(number) for name, number in params.items() if number}


def key_of(point: Point) -> Key:
    """The key of a point. ``dict`` makes the point from it again."""
    return frozenset(point.items())


def read_study(storage: optuna.storages.BaseStorage) -> optuna.Study:
    """The study in a storage, or a new one."""
    sampler = optuna.samplers.TPESampler(multivariate=True, n_startup_trials=_RANDOM_TRIALS, seed=_SEED)
    return optuna.create_study(
        storage=storage, study_name="tune", direction="maximize", sampler=sampler, load_if_exists=True
    )


@contextmanager
def open_journal(
    file: Path | None, subject: dict[str, Any], space: Sequence[Parameter], *, resume: bool | None
) -> Iterator[Journal]:
    """Open a journal, and continue its search if it has the same subject.

    Args:
        file: The journal; created if it does not exist. None keeps the trials in memory only.
        subject: All that the figures depend on: model, options, objective, machine.
        space: All parameters.
        resume: True to require a search that can continue, False to start a new one, None to continue if possible.

    Raises:
        ServeError: invalid_input: another process uses the file, it is not a journal, or it has no search that can
            continue.
        OSError: It cannot be written, as on a full disk. A journal without trials is removed then.
    """
    optuna.logging.disable_default_handler()
    logging.getLogger("optuna").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="optuna")
    wanted = json.dumps([subject, [[one.name, one.choices] for one in space]], sort_keys=True, default=str)
    if file is None:
        yield Journal(read_study(InMemoryStorage()), space)
        return
    no_search = invalid_input(f"--resume: expected the journal of a search in {file}, found no such file")
    if resume and not file.exists():
        raise no_search
    with naming(file), file.open("ab+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise invalid_input(
                f"{file}: expected a journal that is not in use, but another search writes it"
            ) from None
        if not is_journal(file.read_bytes()[: len(_BEGINNING)]):
            raise invalid_input(f"{file}: expected a journal of ortserve tune, got another file")
        file.with_name(f"{file.name}.lock").unlink(missing_ok=True)  # left by a killed process
        if resume is False:
            held.truncate(0)
        cut_partial_line(file)
        is_empty = not file.stat().st_size
        try:
            study = _load(file)
            if study.user_attrs.get(_SUBJECT) != wanted:
                if resume and study.user_attrs:
                    raise invalid_input(
                        f"--resume: {file} belongs to another search: model, options, machine or version differ"
                    )
                if resume:
                    raise no_search
                held.truncate(0)
                is_empty = True
                study = _load(file)
                study.set_user_attr(_SUBJECT, wanted)
        except OSError:  # a full disk, which an empty journal would outlast
            if is_empty:
                file.unlink()
            raise
        yield Journal(study, space)


def _load(file: Path) -> optuna.Study:
    try:
        return read_study(JournalStorage(JournalFileBackend(str(file))))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise invalid_input(f"{file}: expected a journal of ortserve tune, got: {error}") from None


def is_journal(beginning: bytes) -> bool:
    """Whether a file with this beginning may be a journal, and so may be changed. An empty file may."""
    return _BEGINNING.startswith(beginning[: len(_BEGINNING)])


def cut_partial_line(file: Path) -> None:
    """Remove an incomplete last line, which a killed process left. It would make the whole journal unreadable."""
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        with file.open("rb+") as opened:
            opened.truncate(content.rfind(b"\n") + 1)
