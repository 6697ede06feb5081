"""The choice of the connection that a new one replaces."""

from dataclasses import dataclass

from ortserve.frontends.idle_connections import IdleConnections

S = 1_000_000_000


@dataclass(eq=False)
class Peer:
    """A connection that is idle for ``idle`` nanoseconds; None while a request is in progress."""

    idle: int | None = 1
    has_begun: bool = False
    unread: bool = False
    is_evicted: bool = False

    def idle_ns(self, _now_ns: int) -> int | None:
        return self.idle

    def has_unread(self) -> bool:
        return self.unread

    def evict(self) -> None:
        assert not self.is_evicted
        self.is_evicted = True


class Port:
    def __init__(self, *peers: Peer) -> None:
        self.now_ns = 0
        self.evictions = 0
        self.peers = IdleConnections(lambda: self.now_ns, self.count)
        self.add(*peers)

    def count(self) -> None:
        self.evictions += 1

    def add(self, *peers: Peer) -> None:
        for peer in peers:
            self.peers.add(peer)


def evicted(port: Port, *peers: Peer) -> list[int]:
    """Evict one connection. Returns the positions of all evicted ones."""
    port.peers.evict_one()
    return [number for number, peer in enumerate(peers) if peer.is_evicted]


def test_oldest_connection_without_a_request_is_evicted_first() -> None:
    peers = Peer(idle=9 * S, has_begun=True), Peer(), Peer()
    port = Port(*peers)
    assert evicted(port, *peers) == [1]
    assert evicted(port, *peers) == [1, 2]
    assert evicted(port, *peers) == [0, 1, 2]
    assert not port.peers.evict_one()
    assert port.evictions == 3


def test_longest_idle_of_the_used_connections_is_evicted() -> None:
    peers = [Peer(idle=idle, has_begun=True) for idle in (5, 9, 7)]
    port = Port(*peers)
    assert evicted(port, *peers) == [1]
    assert evicted(port, *peers) == [1, 2]


def test_busy_connections_and_those_with_unread_bytes_stay() -> None:
    peers = (
        Peer(idle=None),
        Peer(unread=True),
        Peer(idle=None, has_begun=True),
        Peer(idle=9, has_begun=True, unread=True),
    )
    port = Port(*peers)
    assert not port.peers.evict_one()
    peers[3].unread = False
    assert evicted(port, *peers) == [3]


def test_incomplete_request_is_evicted_after_idle_connections() -> None:
    peers = Peer(idle=0), Peer(idle=1)
    port = Port(*peers)
    assert evicted(port, *peers) == [1]
    assert evicted(port, *peers) == [0, 1]


def test_few_new_connections_have_a_second_for_their_first_request() -> None:
    used = [Peer(idle=2 * S, has_begun=True) for _ in range(10)]
    port = Port(*used)
    port.now_ns = 5 * S
    new = Peer()
    port.add(new)
    assert port.peers.evict_one()
    assert not new.is_evicted
    port.now_ns += S
    assert port.peers.evict_one()
    assert new.is_evicted


def test_many_new_connections_are_evicted_before_used_ones() -> None:
    used = [Peer(idle=2 * S, has_begun=True) for _ in range(10)]
    port = Port(*used)
    for _ in range(1000):
        port.add(Peer())
        port.peers.evict_one()
    assert sum(peer.is_evicted for peer in used) <= 4


def test_each_search_looks_at_a_bounded_number_of_connections() -> None:
    looks = 0

    class Counted(Peer):
        def idle_ns(self, _now_ns: int) -> int | None:
            nonlocal looks
            looks += 1
            return self.idle

    busy = [Counted(idle=None, has_begun=number % 2 == 0) for number in range(4096)]
    port = Port(*busy)
    last = Counted(idle=1, has_begun=True)
    port.add(last)
    searches = 0
    while not last.is_evicted:
        before = looks
        port.peers.evict_one()
        assert looks - before <= 64
        searches += 1
        assert searches < 4096


def test_lost_connection_is_forgotten() -> None:
    lost, other = Peer(), Peer(has_begun=True)
    port = Port(lost, other)
    port.peers.discard(lost)
    assert evicted(port, lost, other) == [1]
    port.peers.discard(other)
