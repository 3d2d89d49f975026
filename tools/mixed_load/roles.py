"""The roles of the mixed load: callers, a trainer and an operator."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loadout.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    LoadoutError,
    NotFound,
)
from tools.mixed_load.base_role import HTTP_TIMEOUT_S, Role, expect, refused

BASE_MODEL = "loadout-demo"
MISFIT = "misfit"
"""The name of an adapter of a model with other shapes."""
UNKNOWN = "nobody-made-this"
WRONG_DIGEST = "sha256:" + "0" * 64
PROMPTS = tuple(f"{word} is what the pages of a prefix are for=" for word in ("this", "that", "it"))
MAX_TOKENS = 24


class Caller(Role):
    """An application: generates over gRPC and HTTP, with and without adapters."""

    def acts(self) -> Sequence[tuple[int, Callable[[], object]]]:
        return (
            (4, lambda: self._complete("")),
            (12, lambda: self._complete(self.adapter())),
            (4, self._stream),
            (2, self._leave),
            (2, self._be_late),
            (1, self._ask_for_unknown),
            (1, self._ask_wrongly),
            (3, self._complete_over_http),
            (3, self._chat_over_http),
            (2, lambda: self.client.embed([self._prompt()], adapter=self.adapter())),
            (1, self._leave_over_http),
            (1, self._ask_wrongly_over_http),
        )

    def _complete(self, adapter: str) -> None:
        self.client.complete(self._prompt(), adapter=adapter, **self._sampling())

    def _stream(self) -> None:
        for _ in self.client.generate(self._prompt(), adapter=self.adapter(), **self._sampling()):
            pass

    def _leave(self) -> None:
        with self.client.generate(self._prompt(), max_tokens=200, ignore_eos=True) as stream:
            next(stream)

    def _be_late(self) -> None:
        with suppress(DeadlineExceeded):  # it is aborted if its first tokens have come
            self.client.complete(
                self._prompt(),
                adapter=self.adapter(),
                timeout_s=0.15,
                max_tokens=200,
                ignore_eos=True,
            )

    def _ask_for_unknown(self) -> None:
        refused(NotFound, self.client.complete, self._prompt(), adapter=UNKNOWN)

    def _ask_wrongly(self) -> None:
        refused(InvalidArgument, self.client.complete, self._prompt(), temperature=-1.0)

    def _complete_over_http(self) -> None:
        body = {"model": self.adapter(), "prompt": self._prompt(), "max_tokens": MAX_TOKENS}
        expect(200, self.post("/v1/completions", body))

    def _chat_over_http(self) -> None:
        messages = [{"role": "user", "content": self._prompt()}]
        body = {"model": BASE_MODEL, "messages": messages, "max_tokens": MAX_TOKENS}
        expect(200, self.post("/v1/chat/completions", {**body, "stream": True}))

    def _leave_over_http(self) -> None:
        body = {"model": BASE_MODEL, "prompt": self._prompt(), "max_tokens": 200}
        body |= {"stream": True, "ignore_eos": True}
        expect(200, self.post("/v1/completions", body, num_lines=1))

    def _ask_wrongly_over_http(self) -> None:
        body = {"prompt": self._prompt()}
        expect(404, self.post("/v1/completions", {**body, "model": UNKNOWN}))
        expect(400, self.post("/v1/completions", {**body, "model": BASE_MODEL, "top_p": 7}))

    def _prompt(self) -> str:
        return self.dice.choice(PROMPTS) + "x" * self.dice.randrange(20)

    def _sampling(self) -> dict[str, Any]:
        num_tokens = self.dice.randrange(4, MAX_TOKENS)
        return {"max_tokens": num_tokens, "ignore_eos": True, "seed": self.dice.randrange(1 << 30)}


class Trainer(Role):
    """A trainer: registers, replaces and deletes adapters, some of which are refused."""

    def acts(self) -> Sequence[tuple[int, Callable[[], object]]]:
        return (
            (3, self._upload),
            (3, self._register),
            (1, self._bring_wrong),
            (2, self._come_and_go),
            (1, self._roll_back),
            (1, self._pin),
            (2, self._look),
        )

    def _upload(self) -> None:
        """Uploads a new version of a popular adapter, or an earlier one."""
        self.client.register(self.adapter(), self._content())

    def _register(self) -> None:
        self.client.register(self.adapter(), self._content().as_uri(), labels={"by": "trainer"})

    def _bring_wrong(self) -> None:
        content = self._content()
        missing = content.with_name("missing").as_uri()
        wrong: Sequence[dict[str, Any]] = (
            {"source": content.as_uri(), "expected_digest": WRONG_DIGEST},
            {"source": content.as_uri(), "if_current_digest": WRONG_DIGEST},
            {"source": content.parent.as_uri()},  # no adapter, only folders of adapters
            {"source": "file:///etc"},
            {"source": missing},
        )
        for fields in wrong:
            refused(LoadoutError, self.client.register, self.adapter(), **fields)

    def _come_and_go(self) -> None:
        self.client.register("passing", self._content())
        self.client.complete(PROMPTS[0], adapter="passing", max_tokens=2, ignore_eos=True)
        self.client.delete("passing")
        refused(NotFound, self.client.delete, "passing")

    def _roll_back(self) -> None:
        name = self.adapter()
        oldest = list(self.client.versions(name))[-1]
        self.client.rollback(name, oldest.version)

    def _pin(self) -> None:
        name = self.adapter()
        self.client.pin(name)
        self.client.unpin(name)

    def _look(self) -> None:
        self.client.get(self.adapter())
        self.client.list_page("", 10)
        refused(NotFound, self.client.get, UNKNOWN)

    def _content(self) -> Path:
        return self.dice.choice(self.scene.contents)


class Operator(Role):
    """An operator: loads in advance, pins, unloads, and reads lists."""

    def acts(self) -> Sequence[tuple[int, Callable[[], object]]]:
        return (
            (2, self._load),
            (1, self._pin),
            (2, self._unload),
            (1, self._load_misfit),
            (1, self._load_over_http),
            (2, self._look),
        )

    def _load(self) -> None:
        self.client.load(self.adapter())

    def _pin(self) -> None:
        """Pins the most popular adapter, which stays until the name gets new content."""
        name = self.scene.names[0]
        with suppress(FailedPrecondition, NotFound):  # NotFound: evicted or replaced in between
            self.client.load(name, pin=True)
            self.client.unpin_resident(name)

    def _unload(self) -> None:
        with suppress(FailedPrecondition, NotFound):  # it is loading, or missing
            self.client.unload(self.adapter())

    def _load_misfit(self) -> None:
        refused(FailedPrecondition, self.client.load, MISFIT)

    def _load_over_http(self) -> None:
        name = self.adapter()
        expect(200, self.post("/v1/load_lora_adapter", {"lora_name": name}))
        self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def _look(self) -> None:
        self.client.residents()
        self.client.server_info()
        self.client.store_status()
        for path in ("/v1/models", "/health"):
            url = f"http://{self.scene.http}{path}"
            with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
                answer.read()
