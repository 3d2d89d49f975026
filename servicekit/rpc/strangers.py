"""Connections that have shown no token: few, of few calls and few bytes. Storming ones are closed.

A connection is a stranger's until one of its calls has a token that the policy knows, and known
from then on. gRPC parses strangers' messages before any code of ours runs, at a cost of some 25 KiB
a call, faster than we can answer. So connections that send too much are reset by the kernel's
counts. Where all connections of an address do too much, the ones that did more than a probe are
reset, and new connections from there wait in the kernel, most of the time, for a while.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from servicekit import heap
from servicekit.rpc.sockets import Accepted, AcceptedSockets, Peer, peer_of_call

logger = logging.getLogger(__name__)

SWEEP_SECONDS, IDLE_SWEEP_SECONDS, MAX_SWEEP_SECONDS = 0.01, 0.02, 0.25
SWEEP_PART, STORM_PART = 0.05, 0.3
"""How often connections are looked at, while strangers are new or send, and else; and the part of a
processor that this may take, unless it would be rarer than MAX_SWEEP_SECONDS: more while there are
MANY_STRANGERS or an address storms, because thousands of connections or calls come between two
looks that are rare."""
NEW_SECONDS, MANY_STRANGERS = 2.0, 64
"""How long a stranger is new; where there are more, they are all looked at as often."""
KNOWN_SECONDS = 300.0
"""How long a connection is known after its last call with a token has ended."""
REFUSED_SECONDS, WAIT_SECONDS = 5.0, 1.0
"""How long an address that stormed gets no new connection, and one that has too many strangers: a
client that asks meanwhile tries again by itself, and is late by so much."""
OPEN_SECONDS, SHUT_SECONDS = 0.2, (0.4, 1.2)
"""An address that storms is let in for so long at a time, or until somebody comes who does more
than a probe, after so long at least and at most: at no fixed time of a second, because clients try
again after whole seconds."""
QUIET_CALLS, QUIET_BYTES = 4, 8 << 10
"""The calls and bytes in a second with which a stranger is left alone when its address storms, as
probes do; and a call and KiB more per second."""
CLOSED_SECONDS = 30.0
"""How long calls of a connection that was closed may still wait to be read."""
TRIM_SECONDS, TRIM_CONNECTIONS, TRIM_CALLS, TRIM_WITHIN_SECONDS = 2.0, 64, 256, 10.0
"""The heap gives back free memory, so often at most, after so many connections or calls of
strangers within so long; for CLOSED_SECONDS, because they are freed one by one."""
LOG_SECONDS = 10.0

_dice = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class StrangerLimits:
    """Limits of strangers.

    There are `max_connections` of them at once: of the address with most the oldest is closed for a
    new one. Of an address there are `address_connections`, which are forgiven at a rate once they
    have ended or are known; the next ones wait in the kernel.

    Each may make so many `calls`, and all of an address `address_calls`, which are forgiven at a
    rate; and send `num_bytes`, all of an address `address_bytes`, and so many more per second. A
    new connection may send `unread_bytes` as long as the server has read none of its calls: they
    may have a token, and a caller may send 64 KiB of each before the server reads it. All such
    connections together may send `all_unread_bytes` more than `num_bytes` each. A connection that
    does more is closed. An address that does more storms: its strangers are closed
    that have done more than a probe, and it is refused for REFUSED_SECONDS, except now and then.

    Calls without a known token on a known connection, as of a proxy's other clients, may be
    `known_calls`; further ones are refused, and the connection stays.

    `resets` are calls that their caller cancels at once. They count for known connections, too,
    each of which is closed by itself.
    """

    max_connections: int = 512
    address_connections: int = 256
    address_connections_per_second: float = 32.0
    calls: int = 128
    calls_per_second: float = 20.0
    address_calls: int = 1024
    address_calls_per_second: float = 100.0
    known_calls: int = 1024
    known_calls_per_second: float = 200.0
    num_bytes: int = 72 << 10
    unread_bytes: int = 576 << 10
    all_unread_bytes: int = 8 << 20
    bytes_per_second: int = 16 << 10
    address_bytes: int = 768 << 10
    address_bytes_per_second: int = 128 << 10
    resets: int = 2000
    resets_per_second: float = 500.0


class _Leak:
    """A count that is forgiven at a rate; if `is_short`, not more than is forgiven in a second
    beyond `limit`."""

    def __init__(self, limit: float, per_second: float, is_short: bool = False) -> None:
        self._most = limit + 1 + per_second if is_short else math.inf
        self.limit = limit
        self._per_second = per_second
        self._count = 0.0
        self._last_s = 0.0

    def add(self, number: float, now_s: float) -> bool:
        """Returns whether the count is beyond the limit with this."""
        forgiven = (now_s - self._last_s) * self._per_second
        count = max(0.0, max(0.0, self._count - forgiven) + number)
        self._count, self._last_s = min(count, self._most), now_s
        return count > self.limit

    def is_empty(self, now_s: float) -> bool:
        self.add(0, now_s)
        return self._count == 0


@dataclass(slots=True)
class _Connection:
    """`num_calls` and `num_bytes` are a stranger's, since `seen_s`. Of these bytes `counted_bytes`
    are its address's, as the connection itself if it `is_counted`."""

    seen_s: float
    calls: _Leak
    known_calls: _Leak
    resets: _Leak
    noted_s: float = 0.0
    inode: int | None = None
    num_calls: int = 0
    first_bytes: int | None = 0
    """The bytes that it had received when it became a stranger; None until the next look."""
    num_bytes: int = 0
    counted_bytes: int = 0
    is_counted: bool = False
    num_running: int = 0
    """Calls with a token."""
    known_s: float = 0.0
    is_known: bool = False
    is_doomed: bool = False

    def is_quiet(self, now_s: float) -> bool:
        """Returns whether it has done no more than a probe."""
        age_s = now_s - self.seen_s
        is_quiet = self.num_calls <= QUIET_CALLS + age_s
        return is_quiet and self.num_bytes <= QUIET_BYTES + 1024 * age_s


@dataclass(slots=True)
class _Address:
    calls: _Leak
    num_bytes: _Leak
    connections: _Leak
    refused_until_s: float = 0.0
    waits_until_s: float = 0.0
    opens_s: float | None = None
    open_until_s: float = 0.0

    def is_idle(self, now_s: float) -> bool:
        """Returns whether nothing of it is to be remembered."""
        counts = (self.calls, self.num_bytes, self.connections)
        is_free = max(self.refused_until_s, self.waits_until_s) <= now_s
        return is_free and all(each.is_empty(now_s) for each in counts)

    def is_shut(self, now_s: float) -> bool:
        """Returns whether it gets no new connection now. While it has too many, there is no
        exception: thousands come at once, of which each costs memory."""
        if self.refused_until_s <= now_s:
            self.opens_s = None
            return self.waits_until_s > now_s
        if self.opens_s is None:
            self.opens_s = now_s + _dice.uniform(*SHUT_SECONDS)
        elif now_s >= self.opens_s:
            self.open_until_s = now_s + OPEN_SECONDS
            self.opens_s = self.open_until_s + _dice.uniform(*SHUT_SECONDS)
        return self.waits_until_s > now_s or now_s >= self.open_until_s


@dataclass(slots=True)
class _Closed:
    """Connections closed since the last line of the log."""

    by_address: Counter[str] = field(default_factory=Counter)
    logged_s: float = 0.0


class Strangers:
    """Watches the connections of a server's port from `start` to `close`, in a thread."""

    def __init__(self, port: int, limits: StrangerLimits | None = None) -> None:
        self._limits = StrangerLimits() if limits is None else limits
        self._sockets = AcceptedSockets(port)
        self._lock = threading.Lock()
        self._connections: dict[Peer, _Connection] = {}
        self._closed_peers: dict[Peer, float] = {}
        self._addresses: dict[str, _Address] = {}
        self._calls = _Leak(TRIM_CALLS, TRIM_CALLS / TRIM_WITHIN_SECONDS, is_short=True)
        self._gone = _Leak(TRIM_CONNECTIONS, TRIM_CONNECTIONS / TRIM_WITHIN_SECONDS, is_short=True)
        """The recent calls and bytes of strangers."""
        self._trimmed_s = self._trim_until_s = self._swept_s = self._pruned_s = 0.0
        self._failed_s = -LOG_SECONDS
        self._is_trim_due = False
        self._is_busy, self._received = False, 0
        """Whether strangers are new, or sent something before the last look."""
        self._is_storm = False
        self._closed = _Closed()
        self._wake, self._is_over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="strangers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent; also before `start`."""
        self._is_over = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._sockets.refuse(())
        self._sockets.close()

    def note_call(self, peer_text: str, is_known: bool) -> bool:
        """Notes a call of gRPC's peer. Returns whether it is to be answered: not if its connection
        is closed, or is going to be."""
        peer = peer_of_call(peer_text)
        if peer is None:
            return True
        now_s = time.monotonic()
        with self._lock:
            connection = self._noted(peer, now_s)
            if connection is None:
                return False
            if is_known:
                connection.num_running += 1
                self._know(peer, connection, now_s)
            elif connection.is_known:
                return not (connection.known_calls.add(1, now_s) or connection.is_doomed)
            else:
                return self._note_stranger(peer, connection, now_s)
            return not connection.is_doomed

    def note_end(self, peer_text: str) -> None:
        """Notes the end of a call with a known token, which `note_call` has noted."""
        peer = peer_of_call(peer_text)
        if peer is None:
            return
        with self._lock:
            connection = self._connections.get(peer)
            if connection is not None:
                connection.num_running = max(0, connection.num_running - 1)
                connection.known_s = time.monotonic()

    def note_reset(self, peer_text: str) -> None:
        """Notes that a call was cancelled as soon as it began."""
        peer = peer_of_call(peer_text)
        if peer is None:
            return
        now_s = time.monotonic()
        with self._lock:
            connection = self._noted(peer, now_s)
            if connection is None or not connection.resets.add(1, now_s):
                return
            if not connection.is_doomed:
                connection.is_doomed = True
                self._wake.set()

    def sweep(self) -> None:
        """Looks at all connections once, and closes the ones that exceed a limit."""
        now_s = time.monotonic()
        accepted = self._sockets.read()
        if accepted is None:  # known facts about the connections stay
            return
        with self._lock:
            self._forget(accepted, now_s)
            found = [(each, self._connections[each.peer]) for each in accepted]
        strangers = [pair for pair in found if not pair[1].is_known]
        received = [each.received_bytes() for each, _ in strangers]
        with self._lock:
            unread_left = self._limits.all_unread_bytes
            for (each, connection), num_bytes in zip(strangers, received, strict=True):
                unread_left -= self._note_bytes(
                    each.peer, connection, num_bytes, now_s, unread_left
                )
            for connection in self._too_many(strangers):
                connection.is_doomed = True
            storming = self._storming(now_s)
            for each, connection in strangers:
                is_stranger = each.peer.host in storming and not connection.is_known
                if is_stranger and not connection.is_quiet(now_s):
                    connection.is_doomed = True
                    self._addresses[each.peer.host].open_until_s = now_s
            is_new = any(now_s - each.seen_s < NEW_SECONDS for _, each in strangers)
            has_sent = sum(received) != self._received
            self._is_storm = len(strangers) > MANY_STRANGERS or bool(storming)
            self._is_busy = is_new or has_sent or self._is_storm
            self._received = sum(received)
            refused = self._refused(strangers, now_s)
            doomed = [pair for pair in found if pair[1].is_doomed]
        self._sockets.refuse(refused)
        for each, _ in doomed:
            self._sockets.reset(each)
            self._closed.by_address[each.peer.host] += 1
        with self._lock:
            for each, connection in doomed:
                self._closed_peers[each.peer] = now_s
                self._is_trim_due |= self._gone.add(not connection.is_known, now_s)
                self._connections.pop(each.peer, None)
        self._tidy(now_s)

    def _storming(self, now_s: float) -> frozenset[str]:
        addresses = self._addresses.items()
        return frozenset(name for name, each in addresses if each.refused_until_s > now_s)

    def _refused(
        self, strangers: list[tuple[Accepted, _Connection]], now_s: float
    ) -> tuple[str, ...]:
        """Returns the addresses that get no new connection, the latest to storm first."""
        limit = self._limits.address_connections
        most = Counter(each.peer.host for each, _ in strangers)
        refused = []
        for name, each in self._addresses.items():
            if each.connections.add(0, now_s) or most[name] > limit:
                each.waits_until_s = now_s + WAIT_SECONDS
            if each.is_shut(now_s):
                refused.append((-max(each.refused_until_s, each.waits_until_s), name))
        return tuple(name for _, name in sorted(refused))

    def _noted(self, peer: Peer, now_s: float) -> _Connection | None:
        """Returns the connection of a call; None if it was closed here."""
        connection = self._connections.get(peer)
        if connection is None:
            if now_s - self._closed_peers.get(peer, -CLOSED_SECONDS) < CLOSED_SECONDS:
                return None
            connection = self._new(peer, now_s)
        connection.noted_s = now_s
        return connection

    def _note_stranger(self, peer: Peer, connection: _Connection, now_s: float) -> bool:
        """Notes a stranger's call. Returns whether it is to be answered."""
        connection.num_calls += 1
        self._is_trim_due |= self._calls.add(1, now_s)
        if connection.calls.add(1, now_s):
            connection.is_doomed = True
        is_storm = self._address(peer.host).calls.add(1, now_s)
        if is_storm:
            self._refuse(peer.host, now_s)
        if connection.is_doomed or is_storm:
            self._wake.set()
        return not connection.is_doomed and (not is_storm or connection.is_quiet(now_s))

    def _know(self, peer: Peer, connection: _Connection, now_s: float) -> None:
        """Its calls and bytes before it was known no longer count for its address."""
        connection.known_s = now_s
        if connection.is_known:
            return
        connection.is_known = True
        address = self._address(peer.host)
        address.num_bytes.add(-connection.counted_bytes, now_s)
        address.connections.add(-connection.is_counted, now_s)
        connection.counted_bytes, connection.is_counted = 0, False

    def _new(self, peer: Peer, now_s: float) -> _Connection:
        limits = self._limits
        connection = self._connections[peer] = _Connection(
            now_s,
            _Leak(limits.calls, limits.calls_per_second),
            _Leak(limits.known_calls, limits.known_calls_per_second, is_short=True),
            _Leak(limits.resets, limits.resets_per_second),
        )
        return connection

    def _address(self, name: str) -> _Address:
        found = self._addresses.get(name)
        if found is None:
            limits = self._limits
            found = self._addresses[name] = _Address(
                _Leak(limits.address_calls, limits.address_calls_per_second, is_short=True),
                _Leak(limits.address_bytes, limits.address_bytes_per_second, is_short=True),
                _Leak(limits.address_connections, limits.address_connections_per_second),
            )
        return found

    def _refuse(self, name: str, now_s: float) -> None:
        self._address(name).refused_until_s = now_s + REFUSED_SECONDS

    def _note_bytes(
        self, peer: Peer, connection: _Connection, num_bytes: int, now_s: float, unread_left: int
    ) -> int:
        """Returns how many of the `unread_left` bytes the connection takes."""
        if connection.is_known:  # since the sweep began
            return 0
        if connection.first_bytes is None:
            connection.first_bytes = num_bytes
        limits = self._limits
        more = max(0, num_bytes - connection.first_bytes - connection.num_bytes)
        connection.num_bytes += more
        connection.counted_bytes += more
        if more and self._address(peer.host).num_bytes.add(more, now_s):
            self._refuse(peer.host, now_s)
        age_s = now_s - connection.seen_s
        beyond = connection.num_bytes - int(limits.num_bytes + limits.bytes_per_second * age_s)
        if beyond <= 0:
            return 0
        is_unread = connection.num_calls == 0 and age_s < NEW_SECONDS
        if is_unread and connection.num_bytes <= limits.unread_bytes and beyond <= unread_left:
            return beyond
        connection.is_doomed = True
        return 0

    def _forget(self, accepted: Iterable[Accepted], now_s: float) -> None:
        """Forgets connections that have ended, and adds new ones."""
        open_ones = {each.peer: each.inode for each in accepted}
        for peer, connection in list(self._connections.items()):
            inode = open_ones.get(peer)
            is_gone = inode is None or connection.inode not in {None, inode}
            # A call that was noted after the sockets were last read is of the new one.
            if is_gone and max(connection.seen_s, connection.noted_s) < self._swept_s:
                del self._connections[peer]
                self._is_trim_due |= self._gone.add(not connection.is_known, now_s)
        for peer, inode in open_ones.items():
            connection = self._connections.get(peer) or self._new(peer, now_s)
            if connection.inode != inode and not connection.is_known:
                self._address(peer.host).connections.add(1, now_s)
                connection.is_counted = True
            connection.inode = inode
            is_unused = connection.num_running == 0
            if connection.is_known and is_unused and now_s - connection.known_s >= KNOWN_SECONDS:
                connection.is_known, connection.seen_s = False, now_s
                connection.first_bytes, connection.num_bytes, connection.num_calls = None, 0, 0
        self._swept_s = now_s

    def _too_many(self, strangers: list[tuple[Accepted, _Connection]]) -> list[_Connection]:
        """Returns those to close: of the address with most, its oldest."""
        excess = len(strangers) - self._limits.max_connections
        if excess <= 0:
            return []
        groups: dict[str, list[_Connection]] = {}
        for each, connection in sorted(strangers, key=lambda pair: -pair[1].seen_s):
            groups.setdefault(each.peer.host, []).append(connection)
        return [max(groups.values(), key=len).pop() for _ in range(excess)]

    def _tidy(self, now_s: float) -> None:
        """Gives memory back after a storm, and logs the closed connections."""
        with self._lock:
            if self._is_trim_due:
                self._is_trim_due = False
                self._trim_until_s = now_s + CLOSED_SECONDS
            if now_s - self._pruned_s >= CLOSED_SECONDS:
                self._prune(now_s)
        if now_s < self._trim_until_s and now_s - self._trimmed_s >= TRIM_SECONDS:
            self._trimmed_s = now_s
            heap.give_back()
        if self._closed.by_address and now_s - self._closed.logged_s >= LOG_SECONDS:
            (address, number), *_ = self._closed.by_address.most_common(1)
            logger.warning(
                "closed connections that showed no token and had too many calls or bytes",
                extra={
                    "connections": self._closed.by_address.total(),
                    "address": address,
                    "of_address": number,
                },
            )
            self._closed = _Closed(logged_s=now_s)

    def _prune(self, now_s: float) -> None:
        self._pruned_s = now_s
        self._closed_peers = {
            peer: closed_s
            for peer, closed_s in self._closed_peers.items()
            if now_s - closed_s < CLOSED_SECONDS
        }
        self._addresses = {
            name: each for name, each in self._addresses.items() if not each.is_idle(now_s)
        }

    def _run(self) -> None:
        while not self._is_over:
            start_s = time.thread_time()
            self._wake.clear()
            try:
                self.sweep()
            except Exception:
                self._fail()
            took_s = time.thread_time() - start_s
            pause_s = SWEEP_SECONDS if self._is_busy else IDLE_SWEEP_SECONDS
            part = STORM_PART if self._is_storm else SWEEP_PART
            self._wake.wait(min(MAX_SWEEP_SECONDS, max(pause_s, took_s / part)))

    def _fail(self) -> None:
        """Lets all in after a look that failed: the next may never come."""
        now_s = time.monotonic()
        if now_s - self._failed_s >= LOG_SECONDS:
            self._failed_s = now_s
            logger.exception("could not look at the connections of callers without a token")
        with suppress(Exception):
            self._sockets.refuse(())
