"""Pixels on their way to the engine's process: one copy, which is let go of whatever happens."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import Command
from inference_svc.engine.transport.pixels import FILES_AT_ONCE
from inference_svc.pictures.prompt import PromptPicture
from servicekit.errors import Unavailable
from servicekit.shared_memory import SharedBytes
from tests.support import forks
from tests.support.machine.open_files import open_files
from tests.support.wait import until
from tests.system.engines import Running
from tests.system.picture_readers import NUM_TOKENS, SETTINGS, Reader, check_answer, submit
from tests.system.transports import start_engine

pytestmark = pytest.mark.processes

NAME = "memfd:loadout-pixels"


@pytest.fixture(scope="module")
def reader(readers: Callable[[str], Reader]) -> Reader:
    return readers("SmolVLM")


@pytest.fixture
def running(reader: Reader) -> Iterator[Running]:
    zoo = reader.zoo
    config = EngineConfig(zoo.model_dir, zoo.kind, num_threads=1, **SETTINGS)
    with forks.forked_engines():
        made = start_engine("process", config, {"of-text": zoo.adapter_dirs["of-text"]})
    yield made
    made.engine.stop()


def num_mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(NAME)


def num_open() -> int:
    """The files of pixels that this process has."""
    gc.collect()
    return sum(NAME in each for each in open_files())


def engine_of(running: Running) -> Any:
    return running.engine


@contextmanager
def paused(running: Running) -> Iterator[None]:
    """Nothing is computed meanwhile."""
    running.call(Command.PAUSE)
    yield
    running.call(Command.RESUME)


def test_requests_of_a_prompt_share_pixels_until_they_end(running: Running, reader: Reader) -> None:
    pid = engine_of(running).pid
    before = num_open()
    prompt, pictures = reader.prompt("three")
    with paused(running):
        for name, adapter in (("a", ""), ("b", "of-text"), ("c", "")):
            running.submit(name, prompt, adapter, pictures=pictures, max_tokens=NUM_TOKENS)
        running.call(Command.DESCRIBE)  # an answer to a later message
        assert num_mapped(pid) == 3, "also if they came in several frames"
        assert num_open() == before + 3
        running.cancel("c")
    for name, adapter in (("a", ""), ("b", "of-text")):
        check_answer(running, name, reader, adapter, "three")
    running.result("c")
    until(lambda: num_mapped(pid) == 0)
    del pictures
    assert num_open() == before


def test_a_request_of_one_step_leaves_no_pixels(running: Running, reader: Reader) -> None:
    """No later message takes the place of its own, while both ends wait for one."""
    before = num_open()
    first = submit(running, reader, "", "one", max_tokens=1)
    running.result(first)
    until(lambda: num_mapped(engine_of(running).pid) == 0)
    until(lambda: num_open() == before)


def test_more_files_arrive_than_one_piece_has(running: Running, reader: Reader) -> None:
    """All of them are of one message."""
    pid = engine_of(running).pid
    prompt, (picture,) = reader.prompt("one")
    count = 2 * FILES_AT_ONCE + 5
    data = bytes(picture.pixels.view)
    pictures = tuple(
        PromptPicture(
            b"%032d" % i, SharedBytes.of("loadout-pixels", data), picture.tile, 1, picture.runs
        )
        for i in range(count)
    )
    with paused(running):
        running.submit("many", prompt, pictures=pictures, max_tokens=1)
        running.call(Command.DESCRIBE)
        assert num_mapped(pid) == count
        assert sum(NAME in each for each in open_files(pid)) == count, "the ones of mappings"
        running.cancel("many")
    running.result("many")
    until(lambda: num_mapped(pid) == 0)


def test_without_files_a_request_is_refused_and_others_go_on(
    running: Running, reader: Reader
) -> None:
    pid = engine_of(running).pid
    num_files = len(open_files(pid)) + 1
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_files, usual[1]))
    first = submit(running, reader, "", "three")
    _, last = running.result(first)
    assert isinstance(last.error, Unavailable)
    assert "no files or memory for the images" in str(last.error)
    assert num_mapped(pid) == 0
    text = submit(running, reader, "", "text")
    check_answer(running, text, reader, "", "text")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
    again = submit(running, reader, "", "one")
    check_answer(running, again, reader, "", "one")


def test_pixels_that_cannot_be_sent_are_refused_and_others_go_on(
    running: Running, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, pictures = reader.prompt("one")
    pixels = pictures[0].pixels
    os.close(pixels.file)  # the system finds no file of this number
    running.submit("closed", prompt, pictures=pictures, max_tokens=1)
    _, last = running.result("closed")
    pixels.file = -1
    assert isinstance(last.error, Unavailable)
    assert "pixels of an image cannot be sent" in caplog.text
    again = submit(running, reader, "", "one")
    check_answer(running, again, reader, "", "one")


def test_a_killed_engine_leaves_no_pixels(
    running: Running, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it dies before it has received them."""
    engine, failures = engine_of(running), []
    before = num_open()
    monkeypatch.setattr(engine, "_on_outputs", lambda step: failures.append(step.failure))
    os.kill(engine.pid, signal.SIGSTOP)
    prompt, pictures = reader.prompt("three")
    running.submit("stopped", prompt, pictures=pictures)
    assert num_open() == before + 3
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: failures)
    engine.stop()
    del pictures
    assert num_open() == before
