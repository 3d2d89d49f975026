"""A name that moves under running requests, and a server that pauses and sleeps: real services."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadout import Client
from loadout.errors import InvalidArgument, LoadoutError, Unavailable
from loadout.retry import RetryPolicy
from loadout.types import Chunk, Registration
from tests.support.models.zoo import Zoo
from tests.support.wait import TIMEOUT_S, until
from tests.system.services import GRACE_S, Services

PROMPT = [ord(char) for char in "some prompt"]
NUM_TOKENS = 200
FOLLOW = ["follow_keep", "follow_recompute"]


@pytest.fixture(
    scope="module",
    params=[
        (1, 1),
        pytest.param((2, 1), marks=pytest.mark.long),
        pytest.param((1, 2), marks=pytest.mark.long),
    ],
    ids=["alone", "ranks", "stages"],
)
def system(
    request: pytest.FixtureRequest,
    zoos: Callable[[str], Zoo],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Services]:
    count, num_stages = map(str, request.param)
    ranks = ("--tensor-parallel", count, "--pipeline-parallel", num_stages)
    flags = ("--adapter-wait-seconds", "3", "--http", "127.0.0.1:0", *ranks)
    folder = tmp_path_factory.mktemp("life")
    with Services(zoos("llama"), folder, inference_flags=flags) as made:
        yield made
        made.check_exit_codes()


def register(system: Services, name: str, variant: str) -> Registration:
    return system.client.register(name, system.zoo.adapter_dirs[variant], base_model="llama")


def http(system: Services, method: str, path: str, body: Any = None) -> Any:
    """Returns the status, and the JSON of an answer."""
    found = json.loads((system.folder / "inference.json").read_text())["http"]
    request = urllib.request.Request(f"http://{found}{path}", method=method)
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, data, timeout=TIMEOUT_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Generation:
    """A request of its own thread, that goes on while the test does something."""

    def __init__(self, client: Client, **fields: Any) -> None:
        self.chunks: list[Chunk] = []
        self.error: Exception | None = None
        self._stream = client.generate(
            PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, **fields
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._stream:
                self.chunks.append(chunk)
        except Exception as error:
            self.error = error

    def join(self) -> list[Chunk]:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.chunks

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


@pytest.mark.parametrize("policy", FOLLOW)
def test_every_part_names_what_made_it(system: Services, policy: str) -> None:
    """A request moves while it runs; each of its tokens is what its version makes of those
    before."""
    name = f"live-{policy.replace('_', '-')}"
    first = register(system, name, "r1").adapter
    system.client.pause()
    running = Generation(system.client, adapter=name, version_policy=policy)
    pinned = Generation(system.client, adapter=name)
    until(lambda: system.client.server_info().generation == "paused")
    system.client.resume()
    until(lambda: len(running.tokens) > 3)
    system.client.pause()  # or it would end before the new version is there
    assert not running.is_done
    second = register(system, name, "r33").adapter
    system.client.load(name)
    system.client.resume()
    chunks = running.join()
    digests = [chunk.adapter.digest for chunk in chunks for _ in chunk.token_ids if chunk.adapter]
    assert len(digests) == NUM_TOKENS
    moved = digests.index(second.digest)
    assert digests == [first.digest] * moved + [second.digest] * (NUM_TOKENS - moved)
    kept = {chunk.kept_tokens for chunk in chunks if chunk.adapter.digest == second.digest}  # type: ignore[union-attr]
    assert kept == ({len(PROMPT) + moved - 1} if policy == "follow_keep" else {0})
    assert {chunk.adapter.digest for chunk in pinned.join() if chunk.adapter} == {first.digest}
    if policy == "follow_recompute":
        known = PROMPT + running.tokens[:moved]
        again = system.client.complete(
            known, adapter=name, max_tokens=8, temperature=0.0, ignore_eos=True
        )
        assert list(again.token_ids) == running.tokens[moved : moved + 8]


def test_a_name_that_moved_before_the_request_ran_is_followed(system: Services) -> None:
    register(system, "early", "r1")
    system.client.pause()
    running = Generation(system.client, adapter="early", version_policy="follow_keep")
    until(lambda: system.client.pause() == 1)
    second = register(system, "early", "r33").adapter
    system.client.load("early")
    system.client.resume()
    chunks = running.join()
    assert {chunk.adapter.digest for chunk in chunks if chunk.adapter} == {second.digest}
    assert {chunk.kept_tokens for chunk in chunks} == {0}


def test_a_deleted_name_leaves_its_requests_alone(system: Services) -> None:
    first = register(system, "deleted", "r1").adapter
    running = Generation(system.client, adapter="deleted", version_policy="follow_recompute")
    until(lambda: running.tokens)
    system.client.delete("deleted")
    chunks = running.join()
    assert {chunk.adapter.digest for chunk in chunks if chunk.adapter} == {first.digest}
    assert len(running.tokens) == NUM_TOKENS


@pytest.mark.parametrize("ref", ["fixed@1", "digest"])
def test_what_cannot_move_is_not_followed(system: Services, ref: str) -> None:
    adapter = register(system, "fixed", "r1").adapter
    ref = adapter.digest if ref == "digest" else ref
    with pytest.raises(InvalidArgument, match="version_policy: cannot follow"):
        system.client.complete(PROMPT, adapter=ref, version_policy="follow_keep", max_tokens=1)
    with pytest.raises(InvalidArgument, match="version_policy: cannot follow"):
        system.client.complete(
            PROMPT, adapters=["fixed"], version_policy="follow_keep", max_tokens=1
        )


def test_over_http_a_choice_says_its_versions(system: Services) -> None:
    first = register(system, "over-http", "r1").adapter
    system.client.pause()
    answers: list[Any] = []
    body = {
        "model": "over-http",
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        "version_policy": "follow_recompute",
    }
    asking = threading.Thread(
        target=lambda: answers.append(http(system, "POST", "/v1/completions", body))
    )
    asking.start()
    until(lambda: system.client.pause() == 1)  # it has begun with the first version
    second = register(system, "over-http", "r33").adapter
    system.client.load("over-http")
    assert http(system, "GET", "/is_paused") == (200, {"is_paused": True})
    assert http(system, "POST", "/resume") == (200, {"status": "resumed"})
    asking.join(TIMEOUT_S)
    ((status, answer),) = answers
    assert status == 200
    assert answer["system_fingerprint"] == first.digest
    version = {"name": f"{second.name}@2", "digest": second.digest, "kept_tokens": 0}
    assert answer["choices"][0]["adapter_versions"] == [{"version": version, "num_tokens": 20}]


def goes_on(running: list[Generation], before: list[list[int]]) -> bool:
    return all(each.is_done for each in running) or [each.tokens for each in running] != before


def test_a_pause_under_load_loses_nothing(system: Services) -> None:
    register(system, "loaded", "r16")
    expected = system.client.complete(
        PROMPT, adapter="loaded", max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    )
    running = [Generation(system.client, adapter="loaded") for _ in range(6)]
    for _ in range(5):
        assert http(system, "POST", "/pause?mode=keep")[0] == 200
        before = [each.tokens for each in running]
        assert http(system, "GET", "/is_paused") == (200, {"is_paused": True})
        assert http(system, "POST", "/resume")[0] == 200
        until(partial(goes_on, running, before))
    for each in running:
        each.join()
        assert each.tokens == list(expected.token_ids)


def test_tokens_name_what_made_them_through_kills(
    zoos: Callable[[str], Zoo], tmp_path: Path
) -> None:
    """A trainer pushes; server and store are killed while requests follow. Each token that came
    before its server's end, or after, is scored again with the version that it names."""
    chance = random.Random(21)
    received: list[Generation] = []
    with Services(zoos("llama"), tmp_path) as system:
        for number in range(9):
            register(system, "live", ("r1", "r16", "r33")[number % 3])
            for policy in ("pin", "follow_recompute"):
                running = Generation(
                    system.client, adapter="live", version_policy=policy, logprobs=0
                )
                received.append(running)
                until(lambda: running.tokens or running.error)  # noqa: B023
            if number in (2, 5):
                os.kill(system.inference.pid, signal.SIGKILL)
                system.inference.stop(GRACE_S)
                system.start_inference()
                system.client.close()
                system.client = Client(
                    inference=system.inference_address, store=system.store_address
                )
            elif number in (3, 7):
                system.kill_store()
                system.start_store()
            elif chance.random() < 0.5:
                system.client.sleep()
                system.client.wake()
        for each in received:
            with suppress(LoadoutError):  # those whose server was killed
                each.join()
            check_scores(system.client, each)
    assert any(each.error for each in received)
    assert any(len(digests_of(each)) > 1 for each in received)


def digests_of(generation: Generation) -> set[str]:
    return {chunk.adapter.digest for chunk in generation.chunks if chunk.adapter}


def check_scores(client: Client, generation: Generation) -> None:
    made_by = [
        (chunk.adapter.digest, each.chosen.logprob)
        for chunk in generation.chunks
        if chunk.adapter
        for each in chunk.logprobs
    ]
    assert len(made_by) == len(generation.tokens)
    for digest in digests_of(generation):
        scored = client.complete(
            PROMPT + generation.tokens, adapter=digest, max_tokens=0, prompt_logprobs=0
        )
        assert scored.prompt_logprobs is not None
        again = list(scored.prompt_logprobs.logprobs)[len(PROMPT) - 1 :]
        for (own, logprob), expected in zip(made_by, again, strict=True):
            assert own != digest or abs(logprob - expected) < 1e-3


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_slept_answers_the_same(system: Services, level: int) -> None:
    register(system, "slept", "r16")
    expected = system.client.complete(
        PROMPT, adapter="slept", max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    )
    running = Generation(system.client, adapter="slept")
    until(lambda: running.tokens)
    status, answer = http(system, "POST", f"/sleep?level={level}")
    assert (status, answer["status"]) == (200, "asleep")
    assert answer["freed_bytes"] > 0
    memory = {use.name: use for use in system.client.server_info().memory}
    assert memory["kv_pages"].capacity_bytes == 0
    assert (memory["weights"].capacity_bytes == 0) == (level > 0)
    assert system.client.server_info().generation == "asleep"
    assert http(system, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    status, answer = http(system, "POST", "/v1/completions", {"model": "llama", "prompt": "a"})
    assert (status, answer["error"]["code"]) == (503, "asleep")
    impatient = Client(
        inference=system.inference_address,
        store=system.store_address,
        retry=RetryPolicy(max_attempts=1),
    )
    with impatient, pytest.raises(Unavailable, match="sleeps until it is woken"):
        impatient.load("slept")
    assert http(system, "POST", "/wake_up?tags=weights")[1]["seconds"] > 0
    assert http(system, "POST", "/wake_up?tags=kv_cache")[1]["seconds"] == 0
    running.join()
    assert running.tokens == list(expected.token_ids)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/pause?mode=later", "mode"),
        ("/pause?resume_after_seconds=soon", "resume_after_seconds"),
        ("/pause?resume_after_seconds=-1", "resume_after_seconds"),
        ("/pause?resume_after_seconds=nan", "resume_after_seconds"),
        ("/pause?clear_cache=maybe", "clear_cache"),
        ("/pause?until=noon", "until"),
        ("/sleep?level=3", "level"),
        ("/sleep?mode=abort", "mode"),
        ("/wake_up?tags=everything", "tags"),
        ("/resume?now=1", "now"),
    ],
)
def test_a_wrong_parameter_is_named(system: Services, path: str, field: str) -> None:
    status, answer = http(system, "POST", path)
    assert (status, answer["error"]["param"]) == (400, field)
    assert system.client.server_info().generation == "running"
