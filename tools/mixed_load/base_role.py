"""A thread of the load: subclasses have the actions, and this class chooses among them.

At first it does every action once, in order, so that everything happens early. Then it chooses at
random with its own seed, so that a seed always gives the same sequence.
"""

from __future__ import annotations

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadout import Client
from loadout.errors import LoadoutError

HTTP_TIMEOUT_S = 60.0
SKEW = 0.8
"""Exponent of a Pareto distribution; a smaller one spreads requests over more adapters."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The shared objects of all roles: a client that never retries, the HTTP API, the adapters'
    names (popular ones first), and folders of further content that the store may read."""

    client: Client
    http: str
    names: tuple[str, ...]
    contents: tuple[Path, ...]


class Role:
    """A thread's work until `stop`, with `pause_s` between two actions. An exception ends the
    thread and is kept in `error`; `has_toured` is set after every action has run once."""

    def __init__(self, scene: Scene, seed: str, stop: threading.Event, pause_s: float) -> None:
        self.scene = scene
        self.client = scene.client
        self.dice = random.Random(seed)
        self.error: BaseException | None = None
        self.has_toured = threading.Event()
        self._stop = stop
        self._pause_s = pause_s
        self.thread = threading.Thread(target=self._run, name=f"load-{seed}", daemon=True)

    def acts(self) -> Sequence[tuple[int, Callable[[], object]]]:
        """Returns the actions in their first order, each with its later frequency."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            for act in self._course():
                act()
                if self._stop.wait(self._pause_s):
                    return
        except BaseException as error:
            self.error = error
        finally:
            self.has_toured.set()

    def _course(self) -> Iterator[Callable[[], object]]:
        weights, acts = zip(*self.acts(), strict=True)
        yield from acts
        self.has_toured.set()
        while True:
            yield self.dice.choices(acts, weights)[0]

    def adapter(self) -> str:
        index = int(self.dice.paretovariate(SKEW)) - 1
        return self.scene.names[index % len(self.scene.names)]

    def post(self, path: str, body: dict[str, Any], num_lines: int | None = None) -> int:
        """Returns the answer's status; with `num_lines`, reads that many lines and disconnects."""
        request = urllib.request.Request(
            f"http://{self.scene.http}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
                if num_lines is None:
                    answer.read()
                else:
                    for _ in range(num_lines):
                        answer.readline()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code


def refused(
    kind: type[LoadoutError], call: Callable[..., object], *words: Any, **more: Any
) -> None:
    """Checks that `call` with these arguments raises this error. Raises AssertionError if not."""
    try:
        call(*words, **more)
    except kind:
        return
    raise AssertionError(f"not refused: {call} {words} {more}")


def expect(wanted: int, status: int) -> None:
    """Raises AssertionError for another HTTP status."""
    assert status == wanted, f"{status} instead of {wanted}"
