"""Reports of ranks for operators: where threads are, and the seconds of steps."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inference_svc.engine.ranks import report
from inference_svc.engine.ranks.report import RankStacks
from inference_svc.engine.transport import process
from inference_svc.engine.transport.process import EngineProcess
from inference_svc.model.description import Rank
from tests.support.inference.ranks import config_of, no_store, save_model
from tests.support.wait import until


def test_ranks_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ANSWER_S", 0.2)
    collected = RankStacks(["rank 1", "rank 2"], lambda: collected.take("rank 2", "here"))
    assert collected.collect() == {"rank 1": "no answer within 0.2 s\n", "rank 2": "here"}


def test_answers_are_awaited() -> None:
    def ask() -> None:
        threading.Timer(0.1, collected.take, ("rank 1", "here")).start()

    collected = RankStacks(["rank 1"], ask)
    assert collected.collect() == {"rank 1": "here"}


@pytest.mark.processes
@pytest.mark.usefixtures("forked_ranks")
def test_all_ranks_write_where_their_threads_are(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, so that their lines do not mix."""
    monkeypatch.setattr(process, "DUMP_S", 1.0)  # others use the processors
    engine = EngineProcess(config_of(save_model(tmp_path), 2), no_store).load()
    try:
        engine.start(lambda outputs: None)
        engine.dump_stacks()
        written: list[str] = []

        def is_all_written() -> bool:
            written.append(capfd.readouterr().err)
            return 'ranks/main.py", line' in "".join(written)

        until(is_all_written)
    finally:
        engine.stop()
    found = re.findall(r"transport/thread.py|ranks/main.py", "".join(written))
    assert found == sorted(found, reverse=True)
    assert "transport/thread.py" in found


@dataclass
class Exchanged:
    """An exchange that nobody uses, which has taken so long so far."""

    seconds: float

    def sum(self, x: Any) -> None:
        raise AssertionError

    def side_by_side(self, x: Any) -> Any:
        raise AssertionError

    def broadcast(self, x: Any) -> None:
        raise AssertionError


def test_exchanges_that_load_adapters_are_none_of_steps() -> None:
    """Seconds in exchanges are a part of the seconds of steps."""
    figures, exchange = report.Report(Rank(0, 2), 1), Exchanged(3.0)
    figures.exchange = exchange
    exchange.seconds = 5.0  # of magnitudes
    with figures.step():
        exchange.seconds = 5.25
    with figures.step(is_new=False):
        exchange.seconds = 5.5
    found = figures.status(0, 0)
    assert (found.num_steps, found.exchange_s) == (1, 0.5)
