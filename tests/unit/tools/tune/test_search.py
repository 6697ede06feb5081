"""The search, its end and its journal, with virtual measurements."""

from pathlib import Path

import pytest

from ortserve.errors import ServeError
from ortserve.tools.tune.journal import open_journal
from ortserve.tools.tune.space import Changes
from scarcity import files_of_at_most
from virtual_lab import MEMORY, SPACE, VirtualLab, end, search

BOTH = {"instances": 2, "max_rows": 2}


def two_keys_help(changes: Changes) -> float:
    return (1.5 if changes.get("max_rows") == 8 else 1.0) * (1.2 if changes.get("session.spinning") else 1.0)


def test_finds_the_keys_that_help_and_their_gains() -> None:
    lab = VirtualLab(two_keys_help)
    ending, _ = search(lab, minutes=6)
    assert ending is not None
    assert ending.point == {"spinning": 1, "max_rows": 2}
    ratio = ending.confirmation.ratio
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 1.8 < ratio.high
    gains = {gain.parameter: gain.ratio.value for gain in ending.gains if gain.ratio and gain.is_kept}
    assert gains == {"spinning": pytest.approx(1.2, rel=0.15), "max_rows": pytest.approx(1.5, rel=0.15)}
    assert lab.running == 0


def test_figures_do_not_contradict_the_ratios_beside_them(tmp_path: Path) -> None:
    lab = VirtualLab(two_keys_help)
    lab.slowness = lambda now_s: 1 + now_s / 300
    ending, _ = search(lab, minutes=6, journal=tmp_path / "journal")
    with open_journal(tmp_path / "journal", {"model": "m"}, SPACE, resume=True) as journal:
        trials = sorted(journal.trials.values(), key=lambda trial: trial.number)
    assert ending is not None
    found = ending.confirmation
    pairs = [(trial.ratio, trials[0].figures, trial.figures) for trial in trials]
    for ratio, current, figures in (*pairs, (found.ratio, found.current, found.best)):
        assert ratio is not None
        assert current is not None
        assert figures is not None
        assert figures.throughput_per_s == pytest.approx((current.throughput_per_s or 0) * ratio.value)


def test_leaves_out_a_key_that_gains_nothing_beside_another() -> None:
    # Either change alone suffices.
    def truth(changes: Changes) -> float:
        if changes.get("intra_op_threads") == 1 and changes.get("instances") == 2:
            return 1.8
        return 1.3 if changes.get("intra_op_threads") == 1 or changes.get("session.spinning") else 1.0

    endings = [search(VirtualLab(truth, seed=seed), minutes=8)[0] for seed in range(6)]
    points = [ending.point for ending in endings if ending is not None]
    assert points.count({"threads": 1, "instances": 1}) >= 5
    assert all(point.items() >= {"threads": 1, "instances": 1}.items() for point in points)


def test_writes_nothing_in_95_percent_of_searches_where_nothing_helps() -> None:
    confirmed = 0
    for seed in range(100):
        ending, trials = search(VirtualLab(lambda changes: 1.0, seed=seed, spread=0.1), minutes=2)
        assert trials > 3
        confirmed += ending is not None and bool(ending.point)
    assert confirmed <= 5


@pytest.mark.parametrize("minutes", [0.5, 1, 3, 10])
@pytest.mark.parametrize("open_s", [0.8, 4.0])
def test_search_ends_within_its_time(minutes: float, open_s: float) -> None:
    lab = VirtualLab(two_keys_help, open_s=open_s)
    search(lab, minutes=minutes)
    assert lab.now_s <= minutes * 60 * 1.1 + 4 * open_s * (minutes < 1)


@pytest.mark.parametrize("after_s", [0, 20, 60, 90, 110])
@pytest.mark.parametrize("slowness", [3, 8])
def test_keeps_the_time_beside_other_work(after_s: float, slowness: float) -> None:
    lab = VirtualLab(two_keys_help)
    lab.slowness = lambda now_s: slowness if now_s > after_s else 1.0
    search(lab, minutes=3)
    assert lab.now_s <= 180 * 1.2


def test_confirms_nothing_when_the_time_is_over() -> None:
    lab = VirtualLab(two_keys_help)
    lab.slowness = lambda now_s: 8 if now_s > 90 else 1.0
    ending, _ = search(lab, minutes=3)
    assert ending is not None
    assert not ending.point
    assert "no time was left to confirm it" in ending.why


def test_trial_says_that_it_was_pruned_because_the_time_was_over(tmp_path: Path) -> None:
    lab = VirtualLab(lambda changes: 1.2 if changes else 1.0)
    lab.slowness = lambda now_s: 100 if now_s > 60 else 1.0
    search(lab, minutes=3, journal=tmp_path / "journal")
    with open_journal(tmp_path / "journal", {"model": "m"}, SPACE, resume=True) as journal:
        trials = sorted(journal.trials.values(), key=lambda trial: trial.number)
    assert (trials[-1].state, trials[-1].why) == ("pruned", "the time was over")
    assert not any(trial.why for trial in trials[:-1])


def test_never_chooses_a_configuration_with_wrong_outputs() -> None:
    def truth(changes: Changes) -> float:
        return 0.0 if changes.get("session.spinning") else two_keys_help(changes)

    ending, _ = search(VirtualLab(truth), minutes=6)
    assert ending is not None
    assert ending.point == {"max_rows": 2}


def test_measures_a_much_slower_configuration_for_one_pair_only() -> None:
    lab = VirtualLab(lambda changes: 0.2 if changes else 1.0)
    ending, trials = search(lab, minutes=2)
    assert ending is None
    assert trials > 7
    assert lab.now_s / trials < 10


def test_killed_search_resumes_from_its_journal(tmp_path: Path) -> None:
    """A trial that was interrupted is repeated; finished trials are not."""
    file = tmp_path / "journal"
    lab = VirtualLab(two_keys_help)

    def kill(changes: Changes) -> None:
        if changes.get("max_rows") == 1:
            raise KeyboardInterrupt

    lab.on_open = kill
    with pytest.raises(KeyboardInterrupt):
        search(lab, minutes=6, journal=file)
    tried = [changes for changes in lab.opened if changes]
    assert len(tried) > 3
    with file.open("ab") as journal:
        journal.write(b'{"op_code": 6, "worker')  # the state left by a process that dies during a write
    again = VirtualLab(two_keys_help, seed=3)
    ending, trials = search(again, minutes=6, journal=file)
    assert ending is not None
    assert ending.point == {"spinning": 1, "max_rows": 2}
    first = next(changes for changes in again.opened if changes)
    assert first == {"session.spinning": True, "max_rows": 1}
    assert trials >= len(tried) + 1
    assert sum(changes == tried[0] for changes in again.opened) == 0


def test_a_journal_of_another_search_is_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    with pytest.raises(ServeError, match="found no such file"), open_journal(file, {"model": "m"}, SPACE, resume=True):
        pass
    search(VirtualLab(two_keys_help), minutes=1, journal=file)
    with open_journal(file, {"model": "m"}, SPACE, resume=True) as journal:
        assert journal.trials
        with pytest.raises(ServeError, match="in use"), open_journal(file, {"model": "m"}, SPACE, resume=None):
            pass
    with pytest.raises(ServeError, match="to another search"), open_journal(file, {"model": "n"}, SPACE, resume=True):
        pass
    with open_journal(file, {"model": "n"}, SPACE, resume=None) as journal:
        assert not journal.trials
    file.write_text("no journal\n")
    with pytest.raises(ServeError, match="another file"), open_journal(file, {"model": "m"}, SPACE, resume=None):
        pass


def test_keeps_a_decision_without_which_the_others_do_not_open() -> None:
    def truth(changes: Changes) -> float:
        if changes.get("instances") == 4 and "max_rows" not in changes:
            return 0.0
        return 1.5 if changes.get("instances") == 4 else 1.0

    lab = VirtualLab(truth)
    assert end(lab, BOTH).point == BOTH
    assert lab.running == 0


def test_keeps_a_decision_without_which_the_bound_is_missed() -> None:
    """Less memory is worthless if requests are late, although memory does not need the decision."""
    lab = VirtualLab(lambda changes: 1.0 if "max_rows" in changes or not changes else 0.2)
    lab.memory = lambda changes: 10**8 if "instances" in changes else 2 * 10**8
    assert end(lab, BOTH, MEMORY).point == BOTH


def test_does_not_confirm_what_misses_the_bound() -> None:
    lab = VirtualLab(lambda changes: 0.2 if changes else 1.0)
    lab.memory = lambda changes: 10**8 if changes else 2 * 10**8
    ending = end(lab, {"instances": 2}, MEMORY)
    assert not ending.point
    assert "take longer than 20 ms" in ending.why


def test_has_two_configurations_open_at_most() -> None:
    lab = VirtualLab(lambda changes: 1.5 if changes.get("max_rows") == 8 else 1.0)
    most = 0

    def count(changes: Changes) -> None:
        nonlocal most
        most = max(most, lab.running + 1)

    lab.on_open = count
    assert end(lab, {"threads": 1, "spinning": 1, "instances": 1, "max_rows": 2}).point == {"max_rows": 2}
    assert most == 2


def test_a_current_configuration_that_fails_ends_the_search() -> None:
    lab = VirtualLab(two_keys_help)
    with pytest.raises(ServeError, match="its process ended"):
        search(lab, minutes=6, kill_current_after=3)
    assert lab.running == 0


@pytest.mark.parametrize("text", ["no journal", '{"op": 1}\nhalf'])
def test_files_that_are_no_journals_stay_as_they_are(tmp_path: Path, text: str) -> None:
    file = tmp_path / "data.npz"
    file.write_text(text)
    for resume in (True, False, None):
        with pytest.raises(ServeError), open_journal(file, {"model": "m"}, SPACE, resume=resume):
            pass
        assert file.read_text() == text


def test_a_full_disk_leaves_no_journal_without_trials_and_keeps_one_with_trials(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    for size in (10, 200):  # the first line does not fit, or the subject of the search
        with (
            files_of_at_most(size),
            pytest.raises(OSError, match=r"File too large: '.*journal'"),
            open_journal(file, {"model": "m"}, SPACE, resume=None),
        ):
            pass
        assert not [*tmp_path.iterdir()]
    search(VirtualLab(two_keys_help), minutes=3, journal=file)
    with (
        files_of_at_most(file.stat().st_size + 10),
        pytest.raises(OSError, match="File too large"),
        open_journal(file, {"model": "m"}, SPACE, resume=True),
    ):
        pass
    with open_journal(file, {"model": "m"}, SPACE, resume=True) as journal:
        assert len(journal.trials) > 1
