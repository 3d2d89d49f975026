"""The stores of all ranks, and of the server's own process, know the same of replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference_svc.engine.transport.messages import StoreMessage
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.store.client import NoStore
from tests.support.inference.ranks import config_of, save_model
from tests.support.wait import until


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


@pytest.mark.processes
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
