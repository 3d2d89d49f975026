"""A thread that puts load on: what it does is its subclass's, when it does what is here.

It does all that it can do once, in order, so that everything has happened early on; then it chooses
by its own dice, so that a seed gives it the same course.
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
"""Exponent of a Pareto distribution: a smaller one spreads requests over more adapters."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What all of them share: a client that never retries, the HTTP API, the adapters' names,
    the popular ones first, and folders of further content under a root that the store may read."""

    client: Client
    http: str
    names: tuple[str, ...]
    contents: tuple[Path, ...]


class Role:
    """A thread's work until `stop`. `pause_s` is between two acts. What goes wrong is in `error`,
    and ends it; `has_toured` is set when everything was done once."""

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
        """What it does, in this order at first, and how often afterwards."""
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
        """The status of the answer, of which at most `num_lines` are read: then the caller is
        gone."""
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
    """`call` with these arguments ends with this error. Raises AssertionError if it does not."""
    try:
        call(*words, **more)
    except kind:
        return
    raise AssertionError(f"not refused: {call} {words} {more}")


def expect(wanted: int, status: int) -> None:
    """Raises AssertionError for another status of HTTP."""
    assert status == wanted, f"{status} instead of {wanted}"
