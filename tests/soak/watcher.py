"""A watcher that goes on from life to life, as an inference service does."""

from __future__ import annotations

import random
import threading

import grpc

from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as pb_grpc
from tests.soak.calls import Event, to_event
from tests.soak.replicas import BURIAL_S, Life, Roster


class Watcher:
    """What it has been told once has to stay in the history, and comes without gaps."""

    def __init__(self, seed: int, roster: Roster) -> None:
        self.seen: list[Event] = []
        self.error: BaseException | None = None
        self._random = random.Random(f"{seed}/watcher")
        self._roster = roster
        self.thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def check(self, events: list[Event]) -> None:
        """`events`: the whole history, in the end."""
        assert self.seen == events[: len(self.seen)], "a watcher was told of what is not there"

    def _run(self) -> None:
        try:
            while (life := self._roster.pick(self._random)) is not None:
                self._watch(life)
        except BaseException as error:
            self.error = error

    def _watch(self, life: Life) -> None:
        newest = self.seen[-1].revision if self.seen else 0
        with grpc.insecure_channel(life.address) as channel:
            stub = pb_grpc.AdapterStoreServiceStub(channel)
            stream = stub.WatchAdapters(pb.WatchAdaptersRequest(since_revision=newest))
            try:
                for response in stream:
                    if self._roster.is_closed:
                        return
                    newest = self._take(response.event, newest)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
        assert life.buried.wait(BURIAL_S), "a store that runs cannot be watched"

    def _take(self, event: pb.AdapterEvent, newest: int) -> int:
        if event.kind == pb.EVENT_KIND_BOOKMARK:
            assert event.revision == newest, f"a bookmark at {event.revision} after {newest}"
            return newest
        assert event.revision == newest + 1, f"event {event.revision} came after {newest}"
        self.seen.append(to_event(event))
        return event.revision
