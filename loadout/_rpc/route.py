"""One call's way to a service, over all of its attempts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from loadout._routing.fleet import Fleet, ReplicaChannel
from loadout._routing.metadata import ADAPTER_HEADER
from loadout._rpc import status
from loadout.errors import InvalidArgument, LoadoutError, ResourceExhausted, StreamLost
from loadout.retry import GONE, Attempts
from loadout.security import Security

Headers = tuple[tuple[str, str], ...]
Trailers = Iterable[tuple[str, str | bytes]] | None
Restore = Callable[[str, float | None], Any]
"""Uploads the files that a replica lacks, in so many seconds, and returns the route to it."""

IMAGE_NOT_FOUND = "IMAGE_NOT_FOUND"
"""Reason of a server that has no file for the hash of an image."""


class Route(Protocol):
    """`send` begins an attempt, `failed` or `done` ends it; `done` may be called at any time.

    `headers` go with every attempt.
    """

    headers: Headers

    @property
    def service(self) -> str:
        """Returns the service's name in messages, such as "the adapter store"."""

    @property
    def resolving(self) -> Future[None] | None:
        """The resolution of addresses, to wait for before the first `send`; None: none is due."""

    @property
    def address(self) -> str:
        """The address of the replica of the last attempt; "" where there is no choice."""

    def send(self, request: Any, timeout: float | None) -> Any: ...
    def failed(self, failure: LoadoutError, trailers: Trailers) -> bool:
        """Returns whether the next attempt goes to another replica, known to be healthy."""

    def done(self, trailers: Trailers = None) -> None:
        """`trailers` are the response's, if there was one; () if they are not known."""


def check_known(replica: str, addresses: Collection[str]) -> None:
    """Raises InvalidArgument for an unknown replica."""
    if replica not in addresses:
        raise InvalidArgument(
            f"replica: {replica!r} is not one of {', '.join(addresses)}",
            code="INVALID_ARGUMENT",
            subject="replica",
        )


def delay_after(error: Any, route: Route, attempts: Attempts, *, repeatable: bool) -> float:
    """Returns seconds to wait after an attempt that ended with this gRPC error. Raises the
    LoadoutError that it stands for if there is to be no other."""
    failure = status.from_rpc_error(error, route.service)
    elsewhere = route.failed(failure, error.trailing_metadata())
    delay_s = attempts.delay_s(failure, repeatable=repeatable, elsewhere=elsewhere)
    if delay_s is None:
        raise failure from error
    return delay_s


def _key_headers(key: str) -> Headers:
    return ((ADAPTER_HEADER, key),) if key else ()


class Direct:
    """The route to a service that has one address."""

    resolving = None
    address = ""

    def __init__(self, service: str, security: Security, method: Any) -> None:
        self.headers: Headers = ()
        self.service = service
        self._security = security
        self._method = method

    def send(self, request: Any, timeout: float | None) -> Any:
        return self._security.sign(self._method, self.headers)(request, timeout=timeout)

    def failed(self, failure: LoadoutError, trailers: Trailers) -> bool:
        return False

    def done(self, trailers: Trailers = None) -> None:
        pass


class ToReplica:
    """The route to one replica of `service`, also while it fails. The address may be a proxy's,
    which finds the replica by the `key`."""

    resolving = None

    def __init__(
        self,
        service: str,
        fleet: Fleet,
        security: Security,
        rpc: str,
        address: str,
        key: str = "",
    ) -> None:
        self.headers: Headers = ()
        self.service = service
        self.address = address
        self._fleet = fleet
        self._security = security
        self._rpc = rpc
        self._key = key
        self._channel: ReplicaChannel | None = None

    def send(self, request: Any, timeout: float | None) -> Any:
        self._channel = self._fleet.acquire_at(self.address)
        headers = (*_key_headers(self._key), *self.headers)
        method = self._security.sign(getattr(self._channel.stub, self._rpc), headers)
        return method(request, timeout=timeout)

    def failed(self, failure: LoadoutError, trailers: Trailers) -> bool:
        if isinstance(failure, StreamLost) or failure.reason in GONE:
            self._fleet.replicas.mark_failed(self.address)
        self.done(trailers)
        return False

    def done(self, trailers: Trailers = None) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._fleet.release(channel, trailers)


class Routed:
    """The route to the replica of `service` that `key` belongs to ("": to any), or, once that one
    has failed this call, to the next."""

    def __init__(
        self,
        service: str,
        fleet: Fleet,
        security: Security,
        rpc: str,
        key: str = "",
        *,
        may_spill: bool = False,
    ) -> None:
        self.headers: Headers = ()
        self.service = service
        self.address = ""
        self._fleet = fleet
        self._security = security
        self._rpc = rpc
        self._key = key
        self._may_spill = may_spill
        self._channel: ReplicaChannel | None = None
        self._tried: set[str] = set()

    @property
    def resolving(self) -> Future[None] | None:
        return self._fleet.resolving

    def send(self, request: Any, timeout: float | None) -> Any:
        self._channel = self._fleet.acquire(self._key, self._tried, may_spill=self._may_spill)
        self.address = self._channel.address
        headers = (*_key_headers(self._key), *self.headers)
        method = self._security.sign(getattr(self._channel.stub, self._rpc), headers)
        return method(request, timeout=timeout)

    def failed(self, failure: LoadoutError, trailers: Trailers) -> bool:
        channel = self._channel
        self.done(trailers)
        if channel is None:
            return False
        if isinstance(failure, StreamLost) or failure.reason in GONE:
            self._fleet.replicas.mark_failed(channel.address)
        elif not isinstance(failure, ResourceExhausted):
            return False
        self._tried.add(channel.address)
        if self._fleet.replicas.has_other(self._tried):
            return True
        # All have been tried: after a while any of them may answer.
        self._tried.clear()
        return False

    def done(self, trailers: Trailers = None) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._fleet.release(channel, trailers)
