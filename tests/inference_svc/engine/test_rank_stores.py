"""The stores of all ranks, and of the server's own process, know the same of replicas; pulls of all
ranks keep one pace."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference_svc.adapters.pulls.pace import PROCESSOR_BYTES_PER_S, PullPace
from inference_svc.core import Request, SamplingParams, Sequence
from inference_svc.engine.build import build_engine
from inference_svc.engine.ranks import group
from inference_svc.engine.transport.messages import StoreMessage
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.host.cpus import usable_cpus
from inference_svc.store.client import NoStore
from tests.support.inference.ranks import config_of, save_model
from tests.support.wait import until

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked_ranks")]


class TalkingStore(NoStore):
    """Publishes a finding of its process when it is asked to, and tells all that it has heard."""

    def __init__(self, publish: Callable[[Any], None]) -> None:
        self._publish = publish
        self._heard: list[Any] = []

    def on_update(self, content: Any) -> None:
        if content == "find":
            self._publish(("found", os.getpid()))
        elif content == "tell":
            self._publish(("heard", os.getpid(), tuple(self._heard)))
        elif content[0] == "found":
            self._heard.append(content[1])


def test_a_finding_of_one_rank_reaches_all(tmp_path: Path) -> None:
    """But not the rank itself."""
    received: list[Any] = []
    config = config_of(save_model(tmp_path), 2)
    engine = EngineProcess(config, TalkingStore, received.append).load()
    try:
        engine.start(lambda outputs: None)
        engine.send(StoreMessage("find"))
        until(lambda: len(received) == 2)
        pids = {pid for _, pid in received}
        assert len(pids) == 2
        assert engine.pid in pids
        engine.send(StoreMessage("tell"))
        until(lambda: len(received) == 4)
        heard = {pid: found for _, pid, found in received[2:]}
        assert heard == {pid: tuple(pids - {pid}) for pid in pids}
    finally:
        engine.stop()


class PacedStore(NoStore):
    """Publishes what is asked for of the pace of this rank's pulls."""

    def __init__(self, publish: Callable[[Any], None]) -> None:
        self._publish = publish

    def on_update(self, content: Any) -> None:
        [pace] = [each for each in gc.get_objects() if isinstance(each, PullPace)]
        self._publish((pace.is_needed(), pace.bytes_per_s))


def test_pulls_of_all_ranks_keep_a_pace_beside_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together the one of a single rank."""
    monkeypatch.setattr(group, "PING_S", 0.1)
    num_processors = usable_cpus()
    config = config_of(save_model(tmp_path), 2, num_threads=num_processors)
    built = build_engine(config, NoStore(), lambda event: None, PacedStore)
    try:
        ranks, told = built.ranks, list[Any]()
        assert ranks is not None
        ranks.on_store_update = told.append
        bytes_per_s = num_processors * PROCESSOR_BYTES_PER_S / 2

        def is_told(*, needs_pace: bool) -> bool:
            """Asks once, and waits for the answer: asked again and again, a busy rank would answer
            older questions first."""
            told.clear()
            ranks.update_stores("pace")
            until(lambda: bool(told))
            return told == [(needs_pace, bytes_per_s)]

        until(lambda: is_told(needs_pace=False))
        sequence = Sequence(Request("r", (1,), SamplingParams()))
        built.engine.scheduler.running.append(sequence)
        until(lambda: is_told(needs_pace=True))
        built.engine.scheduler.running.clear()
        until(lambda: is_told(needs_pace=False))
    finally:
        built.close()
