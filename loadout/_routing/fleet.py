"""The connections to the replicas of the inference service, and an eye on their health.

Replicas are probed while calls are made, and only where there is a choice: a client that is idle
sends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadout._routing.addresses import Resolver, is_name
from loadout._routing.metadata import read_load
from loadout._routing.replicas import Endpoint, Replicas
from loadout.inference.v1 import inference_pb2_grpc as inference_grpc
from loadout.security import Security

PROBE_TIMEOUT_S = 3.0
FIRST_RESOLVE_S = 5.0
"""How long the first call waits for what a name stands for; then gRPC resolves it."""

FLEET_OPTIONS = (
    # In spite of its name, this bounds how long an attempt to connect may take: what a machine
    # that is not there costs the first call that it is asked for.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Streams of a machine that vanished without closing its connections end.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Besides those of every channel, where there are several replicas."""


class Line:
    """The connection to one replica; `num_calls` are those in progress."""

    def __init__(self, endpoint: Endpoint, channel: Any) -> None:
        self.address = endpoint.address
        self.channel = channel
        self.stub = inference_grpc.InferenceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.num_calls = 0


class Fleet(ABC):
    """Every `begin` has its `end`. `targets` are gRPC's; one that is a name may turn out to stand
    for several replicas."""

    def __init__(
        self, api: Any, targets: list[str], security: Security, options: tuple[tuple[str, Any], ...]
    ) -> None:
        self._api = api
        self._security = security
        self._options = options
        self._lines: dict[Endpoint, Line] = {}
        self.replicas = Replicas(map(Endpoint, targets))
        self._lock = self.replicas.lock
        self._resolver: Resolver | None = None
        if len(targets) == 1 and is_name(targets[0]):
            self._resolver = Resolver(targets[0], self.replicas.replace)

    @property
    def is_resolved(self) -> bool:
        """Whether it is known, as far as it can be, how many replicas there are."""
        return self._resolver is None or self._resolver.first.done()

    def begin(self, key: str, avoid: Collection[str], *, may_spill: bool) -> Line:
        """The line for a call: see Replicas.begin."""
        self.look_after()
        with self._lock:
            line = self._line(self.replicas.begin(key, avoid, may_spill=may_spill))
            line.num_calls += 1
            return line

    def end(self, line: Line, trailers: Iterable[tuple[str, str | bytes]] | None = None) -> None:
        """`trailers` are the answer's, if there was one."""
        with self._lock:
            line.num_calls -= 1
        self.replicas.end(line.address)
        self.replicas.told(line.address, read_load(trailers))

    def look_after(self) -> None:
        """Renews, without waiting for it, what is known of the replicas, if that is old."""
        if self._resolver is not None:
            self._resolver.refresh()
        for channel in self._take_unused():
            self._close(channel)
        for endpoint in self.replicas.take_due():
            with self._lock:
                line = self._line(endpoint)
            self._probe(line)

    def open_channels(self) -> list[Any]:
        """For the caller to close: nothing can be called then."""
        with self._lock:
            return [line.channel for line in self._lines.values()]

    @abstractmethod
    def _probe(self, line: Line) -> None:
        """Asks a replica whether it is well, and gives what comes to `_probed`."""

    @abstractmethod
    def _close(self, channel: Any) -> None: ...

    def _probed(
        self,
        line: Line,
        code: grpc.StatusCode,
        answer: health_pb2.HealthCheckResponse | None,
        trailers: Iterable[tuple[str, str | bytes]] | None,
    ) -> None:
        is_serving = answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING
        # Who does not know the question has at least answered.
        is_well = is_serving or code is grpc.StatusCode.UNIMPLEMENTED
        self.replicas.probed(line.address, is_well, read_load(trailers))

    def _line(self, endpoint: Endpoint) -> Line:
        line = self._lines.get(endpoint)
        if line is None:
            is_alone = len(self.replicas.endpoints) == 1
            options = self._options if is_alone else (*self._options, *FLEET_OPTIONS)
            channel = self._security.open_channel(
                self._api, endpoint.address, options, endpoint.server_name
            )
            line = self._lines[endpoint] = Line(endpoint, channel)
        return line

    def _take_unused(self) -> list[Any]:
        """The channels to replicas of the past, once their calls have ended."""
        if self._resolver is None:
            return []
        wanted = set(self.replicas.endpoints)
        with self._lock:
            unused = [
                endpoint
                for endpoint, line in self._lines.items()
                if endpoint not in wanted and not line.num_calls
            ]
            return [self._lines.pop(endpoint).channel for endpoint in unused]


class BlockingFleet(Fleet):
    """For `Client`: from any thread."""

    def begin(self, key: str, avoid: Collection[str], *, may_spill: bool) -> Line:
        if self._resolver is not None and not self._resolver.first.done():
            with contextlib.suppress(TimeoutError):
                self._resolver.first.result(FIRST_RESOLVE_S)
        return super().begin(key, avoid, may_spill=may_spill)

    def _probe(self, line: Line) -> None:
        call = line.health.Check.future(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)

        def take(done: Any) -> None:
            code = done.code()
            answer = done.result() if code is grpc.StatusCode.OK else None
            self._probed(line, code, answer, done.trailing_metadata())

        call.add_done_callback(take)

    def _close(self, channel: Any) -> None:
        channel.close()


class AsyncFleet(Fleet):
    """For `AsyncClient`: on one event loop."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tasks: set[asyncio.Task[None]] = set()

    async def resolved(self) -> None:
        """Returns when `is_resolved`, or when that takes too long."""
        if self._resolver is None or self._resolver.first.done():
            return
        first = asyncio.wrap_future(self._resolver.first)
        await asyncio.wait([first], timeout=FIRST_RESOLVE_S)

    async def end_probes(self) -> None:
        """Before the channels are closed: what still runs then outlives the loop."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _probe(self, line: Line) -> None:
        self._start(self._ask(line))

    async def _ask(self, line: Line) -> None:
        call = line.health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        try:
            answer = await call
        except grpc.RpcError as error:
            self._probed(line, error.code(), None, error.trailing_metadata())
        else:
            self._probed(line, grpc.StatusCode.OK, answer, await call.trailing_metadata())

    def _close(self, channel: Any) -> None:
        self._start(channel.close())

    def _start(self, work: Any) -> None:
        # The loop itself holds tasks weakly.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
