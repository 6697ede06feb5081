"""Finding the request that makes a batch fail: halve and run again, a bounded number of times."""

from collections.abc import Sequence
from dataclasses import dataclass

from ortserve.batching.queue import ShapeClass
from ortserve.batching.riders import Rider


@dataclass(slots=True, init=False, eq=False)
class Group:
    """Riders of one shape class that run together.

    Attributes:
        search: For an offender, that they belong to.
        tries_one_row: Whether the first row is run by itself, to see that the model takes it. The one rider's own rows
            run afterwards, where it has more.
        is_check: Whether a request that was answered runs again, for ``row_checks``: no client waits for it, and no
            metric counts it as a batch.
    """

    shape_class: ShapeClass
    riders: Sequence[Rider]
    rows: int
    search: "Search | None"
    tries_one_row: bool
    is_check: bool

    def __init__(
        self,
        shape_class: ShapeClass,
        riders: Sequence[Rider],
        rows: int,
        search: "Search | None" = None,
        *,
        tries_one_row: bool = False,
        is_check: bool = False,
    ) -> None:
        self.shape_class = shape_class
        self.riders = riders
        self.rows = rows
        self.search = search
        self.tries_one_row = tries_one_row
        self.is_check = is_check


@dataclass(slots=True)
class Search:
    """Shared by all parts of one failed batch: how many runs it may still take."""

    runs_left: int


def separate(group: Group) -> list[Group]:
    """Split a group into one for each of its riders."""
    return [Group(group.shape_class, (rider,), rider.rows, group.search) for rider in group.riders]


def halve(failed: Group) -> list[Group]:
    """Split a failed group of two or more riders into the groups to run next; empty when the runs are used up.

    One offender among n is alone after at most 2·⌈log2 n⌉ more runs; several may use 4·⌈log2 n⌉ in all, after which
    those not yet answered fail, so that a batch of nothing but offenders cannot occupy the instance.
    """
    search = failed.search or Search(4 * (len(failed.riders) - 1).bit_length())
    if search.runs_left < 2:
        return []
    search.runs_left -= 2
    middle = len(failed.riders) // 2
    halves = (failed.riders[:middle], failed.riders[middle:])
    return [Group(failed.shape_class, half, sum(rider.rows for rider in half), search) for half in halves]
