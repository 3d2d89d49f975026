# Generated from loadout/_rpc/async_caller.py by `make client`: change that file.
"""How the client makes calls: channels, attempts, and each of several replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from loadout._routing.fleet import RESOLVE_TIMEOUT_S
from loadout._routing.metadata import DEFAULT_TENANT
from loadout._rpc import threads
from loadout._rpc.calls import Call
from loadout._rpc.channel import DEFAULT_TIMEOUT_S, Address, Channels
from loadout._rpc.route import Route, check_known, delay_after
from loadout._rpc.tracing import Tracing
from loadout.errors import LoadoutError
from loadout.retry import Attempts, RetryPolicy
from loadout.security import ChannelFactory, Security, TlsConfig

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

T = TypeVar("T")


class Caller:
    """How Client makes its calls. Safe to share between threads."""

    def __init__(
        self,
        inference: Address | None = None,
        store: Address | None = None,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        allow_insecure_token: bool = False,
        tenant: str = DEFAULT_TENANT,
        tracing: TracerProvider | bool = False,
        channel_factory: ChannelFactory | None = None,
    ) -> None:
        security = Security(token, tls, allow_insecure_token)
        traced = Tracing(tracing) if tracing else None
        self._transport = threads.Transport(channel_factory)
        self._channels = Channels(self._transport, inference, store, security, tenant, traced)
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()

    def close(self) -> None:
        """Closes the connections. Running calls end with Cancelled."""
        self._transport.end()
        for channel in self._channels.opened():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, call: Call[T], timeout_s: float | None = None) -> T:
        return self._finish(call, self._channels.route(call), timeout_s)

    def _finish(
        self,
        call: Call[T],
        route: Route,
        timeout_s: float | None,
        *,
        waits_if_gone: bool = True,
    ) -> T:
        response = self._attempt(
            route,
            lambda timeout: route.send(call.request, timeout),
            repeatable=call.repeatable,
            timeout_s=timeout_s,
            waits_if_gone=waits_if_gone,
        )
        return call.convert(response)

    def _attempt(
        self,
        route: Route,
        send: Callable[[float | None], Any],
        *,
        repeatable: bool,
        timeout_s: float | None,
        waits_if_gone: bool = True,
    ) -> Any:
        attempts = self._attempts(timeout_s, waits_if_gone=waits_if_gone)
        try:
            threads.wait(route.resolving, RESOLVE_TIMEOUT_S)
            while True:
                try:
                    response = send(attempts.remaining_s)
                    route.done(())
                    return response
                except grpc.RpcError as error:
                    delay_s = delay_after(error, route, attempts, repeatable=repeatable)
                threads.sleep(delay_s)
        finally:
            route.done()

    def _attempts(self, timeout_s: float | None, *, waits_if_gone: bool = True) -> Attempts:
        seconds = self._timeout_s if timeout_s is None else timeout_s
        return Attempts(self._retry, seconds, waits_if_gone=waits_if_gone)

    def _at_each(self, call: Call[T], replica: str, timeout_s: float | None) -> list[T]:
        """Makes a call at one replica, or at every replica that there is now, even if one fails.
        Raises the first error, with a note that names its replica."""
        threads.wait(self._channels.fleet.refresh(), RESOLVE_TIMEOUT_S)
        addresses = [each.address for each in self._channels.fleet.replicas.statuses()]
        if replica:
            check_known(replica, addresses)
            return [self._at(call, replica, timeout_s)]
        outcomes = threads.gather([partial(self._at, call, each, timeout_s) for each in addresses])
        results = []
        for address, outcome in zip(addresses, outcomes, strict=True):
            if isinstance(outcome, LoadoutError):
                outcome.add_note(f"at replica {address}")
                raise outcome
            results.append(outcome)
        return results

    def _at(self, call: Call[T], replica: str, timeout_s: float | None) -> T:
        return self._finish(call, self._channels.replica_route(call, replica), timeout_s)
