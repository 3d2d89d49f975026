"""Pixels of pictures follow a frame through a socket, as files; what does not arrive is refused."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from inference_svc.core import Request, SamplingParams
from inference_svc.engine.transport.messages import Submit
from inference_svc.engine.transport.pixels import (
    FILES_AT_ONCE,
    lost,
    receive_pixels,
    send_pixels,
)
from inference_svc.pictures.prompt import PromptPicture, Run
from inference_svc.pictures.sizes import Size
from servicekit.errors import Unavailable
from servicekit.shared_memory import Mapped, SharedBytes
from tests.support.machine.open_files import open_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others cannot seal a file")

NAME = "loadout-pixels"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def pixels(value: int) -> SharedBytes:
    return SharedBytes.of(NAME, value.to_bytes(4, "big") * 3)


def submit(name: str, *shown: SharedBytes) -> Submit:
    pictures = tuple(
        PromptPicture(b"%032d" % index, each, Size(2, 2), 1, (Run(index, index + 1),))
        for index, each in enumerate(shown)
    )
    return Submit(Request(name, (1,), SamplingParams(), pictures=pictures))


def through(
    ends: tuple[socket.socket, socket.socket],
    messages: list[Submit],
    mapped: Mapped | None = None,
) -> list[Submit]:
    """The messages at the other end, with the pixels that have arrived."""
    loaded: list[Submit] = pickle.loads(pickle.dumps(messages))
    send_pixels(ends[0], messages)
    receive_pixels(ends[1], loaded, Mapped() if mapped is None else mapped)
    return loaded


def values(message: Submit) -> list[int]:
    return [int.from_bytes(each.pixels.view[:4], "big") for each in message.request.pictures]


def num_files() -> int:
    gc.collect()
    return sum(NAME in each for each in open_files())


def test_requests_of_a_frame_share_pixels(ends: Any) -> None:
    """One file is sent, and mapped once, for any number of requests."""
    before = num_files()
    shared, own = pixels(1), pixels(2)
    first, second = through(ends, [submit("a", shared, own), submit("b", shared)])
    assert (values(first), values(second)) == ([1, 2], [1])
    assert first.request.pictures[0].pixels is second.request.pictures[0].pixels
    assert num_files() == before + 4, "two files here, and the ones of two mappings"


def test_frames_share_pixels(ends: Any) -> None:
    """A picture is mapped once for the requests of any number of frames, as long as one has it."""
    before, mapped = num_files(), Mapped()
    shared, other = pixels(1), pixels(2)
    found = through(ends, [submit("a", shared)], mapped)
    for name in "bcdefgh":
        found += through(ends, [submit(name, shared, other)], mapped)
        del found[:-1]
        assert values(found[0]) == [1, 2]
    assert num_files() == before + 4, "two files here, and the ones of two mappings"
    del found
    assert num_files() == before + 2
    assert values(through(ends, [submit("i", shared)], mapped)[0]) == [1]


def test_a_frame_has_more_files_than_a_piece(ends: Any) -> None:
    """Of several messages: pieces end in the middle of one."""
    size = FILES_AT_ONCE // 2 + 3
    made = [submit(str(i), *(pixels(i * size + j) for j in range(size))) for i in range(5)]
    found = through(ends, made)
    assert [values(each) for each in found] == [values(each) for each in made]
    assert [lost(each) for each in found] == [None] * 5


def test_files_that_cannot_be_sent_are_lost_and_the_next_ones_arrive(ends: Any) -> None:
    """Only the requests of their piece are refused; no byte of the socket is out of place."""
    broken, whole = pixels(1), pixels(2)
    os.close(broken.file)  # the system finds no file of this number
    (first,) = through(ends, [submit("a", broken)])
    broken.file = -1
    refusal = lost(first)
    assert refusal is not None
    assert refusal.request_id == "a"
    assert isinstance(refusal.error, Unavailable)
    (second,) = through(ends, [submit("b", whole)])
    assert lost(second) is None
    assert values(second) == [2]


def test_an_other_end_that_is_gone_is_raised(ends: Any) -> None:
    ends[1].close()
    with pytest.raises(ConnectionError):
        send_pixels(ends[0], [submit("a", pixels(1))])


def test_a_system_without_memory_is_raised() -> None:
    """Where not even a byte can be sent, no later frame could be told from its files."""

    class Full:
        def sendmsg(self, *_: Any) -> int:
            raise OSError(errno.ENOBUFS, "no buffers")

        def sendall(self, _: bytes) -> None:
            raise OSError(errno.ENOBUFS, "no buffers")

    with pytest.raises(OSError, match="no buffers"):
        send_pixels(Full(), [submit("a", pixels(1))])  # type: ignore[arg-type]


FEW = """
import os, pickle, resource, socket, sys, threading, time
from inference_svc.engine.transport import pixels
from tests.inference_svc.engine.test_pixels import pixels as made, submit, values

message = submit("many", *(made(i) for i in range(3 * pixels.FILES_AT_ONCE)))
loaded = pickle.loads(pickle.dumps(message))
here, there = socket.socketpair()
waits, wait = [], time.sleep
usual = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (16, usual[1]))
if os.geteuid() == 0:
    os.setuid(65534)  # root may have any number of files on their way

def slow(seconds):
    waits.append(seconds)
    if len(waits) == 3:  # the other end begins to read
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        threading.Thread(target=pixels.receive_pixels, args=(there, [loaded], {})).start()
    wait(seconds)

pixels.time.sleep = slow
pixels.send_pixels(here, [message])
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(60)
print(len(waits) >= 3, values(loaded) == values(message))
"""


@pytest.mark.processes
def test_more_files_than_the_system_carries_are_waited_for() -> None:
    """ETOOMANYREFS: it takes no more until the other end has received some."""
    found = subprocess.run(
        [sys.executable, "-c", FEW], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout.split() == ["True", "True"], found.stderr
