"""Eight tenants' threads: one of each pushes, updates and deletes, others ask all the while."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadout import Client, errors
from loadout.retry import RetryPolicy
from tests.soak.chaos.adapters import MOST_TOKENS, PROMPTS, Answers, Content, text_of
from tests.soak.chaos.ledger import Answer, Failed, Written
from tests.support.access.policies import token_of

NUM_TENANTS = 8
DURABLE, EPHEMERAL = ("first", "second"), "passing"
"""Names of each tenant; the last one's versions are in the store's memory."""
WRITE_S, ASK_S = 8.0, 10.0
FAILED_S = 0.3
"""Time until the next call after one that failed."""
CANCEL_SHARE, REVISION_SHARE, BASE_SHARE = 0.05, 0.5, 0.05
LOST = "connection lost"
BY_GRPC, BY_HTTP = "gRPC", "HTTP"
DROPPED = "CANCELLED"
"""How gRPC ends calls that come in the moment in which a server stops (see CallInterceptor): those
of a server whose engine was killed, and no others."""
EXPECTED_S = {LOST: 3.0, "UNAVAILABLE": 3.0, "DEADLINE_EXCEEDED": 3.0, "RESOURCE_EXHAUSTED": 3.0}
EXPECTED_S |= {DROPPED: 1.0}
"""How calls may end while something is broken, 503, 504 and 429 over HTTP; and how long before it
may have been mended."""
CODE_OF_STATUS = {404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
CODE_OF_STATUS |= {504: "DEADLINE_EXCEEDED"}


@dataclass
class Book:
    """What the threads write down. Thread-safe: lists only grow."""

    written: list[Written] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    """Calls that ended as they may while something is broken."""
    known: dict[str, Written] = field(default_factory=dict)
    """The last acknowledged change of each name."""
    is_over: threading.Event = field(default_factory=threading.Event)

    def note(self, what: str, code: str, message: str) -> None:
        """Counts an error."""
        self.errors[f"{what}: {code}"] += 1
        told = f"{what}: {code}: {message}"
        if code in EXPECTED_S:
            self.failed.append(Failed(told, time.monotonic(), EXPECTED_S[code]))
        else:
            self.unexpected.append(told)


def code_of(error: errors.LoadoutError) -> str:
    """Returns the code, LOST where the connection ended and no service answered."""
    if isinstance(error, errors.StreamLost) and error.code in ("", "UNAVAILABLE"):
        return LOST
    return error.code


@dataclass(frozen=True, slots=True)
class Where:
    """Addresses: of each replica of the store, and of the inference service."""

    stores: Sequence[str]
    inference: str
    http: str

    def client(self, tenant: str, store: str = "") -> Client:
        return Client(
            store=store or ",".join(self.stores),
            inference=self.inference,
            token=token_of(tenant),
            retry=RetryPolicy(max_attempts=1),
        )


class Writer:
    """Changes its tenant's names, one call at a time, at any of the store's replicas."""

    def __init__(
        self, tenant: str, where: Where, contents: Sequence[Content], seed: int, book: Book
    ) -> None:
        self._tenant, self._contents, self._book = tenant, contents, book
        self._random = random.Random(f"{seed}/{tenant}/writer")
        self._clients = [where.client(tenant, store) for store in where.stores]
        self._versions: dict[str, list[tuple[int, str]]] = {}

    def run(self) -> None:
        while not self._book.is_over.wait(self._random.uniform(0.0, 0.6)):
            name = f"{self._tenant}/{self._random.choice((*DURABLE, EPHEMERAL))}"
            acts: list[Callable[[Client, str], Written]] = [
                self._put,
                self._delete,
                self._roll_back,
            ]
            act = self._random.choices(acts, (8, 1, 2))[0]
            self._do(act, name)
        for client in self._clients:
            client.close()

    def _do(self, act: Callable[[Client, str], Written], name: str) -> None:
        self._digest = ""
        try:
            made = act(self._random.choice(self._clients), name)
        except errors.NotFound:
            known = self._book.known.get(name)
            # There is nothing to delete: judged as an answer is.
            self._book.answers.append(
                Answer(name, self._begun_s, known.revision if known else 0, 0, "", by="the store")
            )
            self._versions.pop(name, None)
            return
        except errors.LoadoutError as error:
            self._book.note("store", code_of(error), str(error))
            made = Written(name, self._digest, time.monotonic())
        if made.is_acknowledged:
            self._book.known[name] = made
        self._book.written.append(made)

    def _put(self, client: Client, name: str) -> Written:
        content = self._random.choice(self._contents)
        self._begin(content.digest)
        is_ephemeral = name.endswith(EPHEMERAL)
        way = self._random.randrange(2 if is_ephemeral else 3)
        if way == 0:
            made = client.push(
                name, content.tensors, content.config, ephemeral=is_ephemeral, timeout_s=WRITE_S
            ).registration
        else:
            source = content.folder if way == 1 else f"file://{content.folder}"
            made = client.register(name, source, ephemeral=is_ephemeral, timeout_s=WRITE_S)
        found = made.adapter
        assert found.digest == content.digest, (
            f"{name}: {found.digest} in place of {content.digest}"
        )
        self._versions.setdefault(name, []).append((found.version, found.digest))
        return Written(name, found.digest, time.monotonic(), made.revision, found.version)

    def _delete(self, client: Client, name: str) -> Written:
        self._begin("")
        revision = client.delete(name, timeout_s=WRITE_S)
        self._versions.pop(name, None)
        return Written(name, "", time.monotonic(), revision)

    def _roll_back(self, client: Client, name: str) -> Written:
        """To one of the last versions; there may be none that is left."""
        versions = self._versions.get(name, [])[-4:]
        if not versions or name.endswith(EPHEMERAL):
            return self._put(client, name)
        version, digest = self._random.choice(versions)
        self._begin(digest)
        made = client.rollback(name, version, timeout_s=WRITE_S)
        return Written(name, digest, time.monotonic(), made.revision, version)

    def _begin(self, digest: str) -> None:
        self._begun_s, self._digest = time.monotonic(), digest


class Reader:
    """Asks for its tenant's adapters, over gRPC or HTTP, and compares every answer."""

    def __init__(
        self,
        tenant: str,
        by: str,
        where: Where,
        known: Mapping[str, Answers],
        seed: int,
        book: Book,
    ) -> None:
        self._tenant, self._by, self._known, self._book = tenant, by, known, book
        self._where = where
        self._random = random.Random(f"{seed}/{tenant}/{by}")
        self._client = where.client(tenant)

    def run(self) -> None:
        while not self._book.is_over.wait(self._random.uniform(0.0, 0.2)):
            if self.ask() is None:
                self._book.is_over.wait(FAILED_S)
        self.close()

    def close(self) -> None:
        self._client.close()

    def ask(self, name: str = "", needs_revision: bool = False) -> Answer | None:
        """Asks for one name, any by default. Returns None for an error."""
        name = name or f"{self._tenant}/{self._random.choice((*DURABLE, EPHEMERAL))}"
        known = self._book.known.get(name)
        has_revision = needs_revision or self._random.random() < REVISION_SHARE
        revision = known.revision if known is not None and has_revision else 0
        if not needs_revision and self._random.random() < BASE_SHARE:
            name, revision = "", 0
        place = self._random.randrange(len(PROMPTS))
        num = self._random.choice((1, 8, MOST_TOKENS))
        begun_s = time.monotonic()
        ask = self._over_grpc if self._by == BY_GRPC else self._over_http
        found = ask(name, revision, place, num)
        if found is None:
            return None
        label, digest, is_right = found
        version = int(label.rpartition("@")[2]) if name and label else 0
        answer = Answer(name, begun_s, revision, version, digest, is_right, self._by)
        if name:
            self._book.answers.append(answer)
        elif not is_right:
            self._book.unexpected.append(f"the base model's answer is wrong: {answer}")
        else:
            self._book.errors[f"{self._by}: base model, right"] += 1
        return answer

    def _over_grpc(
        self, name: str, revision: int, place: int, num: int
    ) -> tuple[str, str, bool] | None:
        """Returns label, digest and whether the tokens are those; ("", "", True) for a name that is
        gone, None for an error."""
        cancels = self._random.random() < CANCEL_SHARE
        tokens: list[int] = []
        label = digest = ""
        try:
            stream = self._client.generate(
                list(PROMPTS[place]),
                adapter=name,
                min_revision=revision,
                timeout_s=ASK_S,
                max_tokens=num,
                temperature=0.0,
                ignore_eos=True,
            )
            for chunk in stream:
                if chunk.adapter is not None:
                    label, digest = chunk.adapter.name, chunk.adapter.digest
                tokens += chunk.token_ids
                if cancels:
                    stream.close()
                    self._book.errors[f"{self._by}: cancelled by its caller"] += 1
                    return None
        except errors.NotFound:
            return "", "", True
        except errors.LoadoutError as error:
            self._book.note(self._by, code_of(error), str(error))
            return None
        return label, digest, self._is_right(digest, place, tuple(tokens), num)

    def _over_http(
        self, name: str, revision: int, place: int, num: int
    ) -> tuple[str, str, bool] | None:
        body = {"model": name or "bench-tiny", "prompt": list(PROMPTS[place]), "max_tokens": num}
        body |= {"temperature": 0, "ignore_eos": True, "min_revision": revision}
        headers = {
            "authorization": f"Bearer {token_of(self._tenant)}",
            "content-type": "application/json",
        }
        connection = http.client.HTTPConnection(self._where.http, timeout=ASK_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        except TimeoutError:
            self._book.note(self._by, "DEADLINE_EXCEEDED", "")
            return None
        except (OSError, http.client.HTTPException):
            self._book.note(self._by, LOST, "")
            return None
        finally:
            connection.close()
        if response.status == 404:
            return "", "", True
        if response.status != 200:
            code = CODE_OF_STATUS.get(response.status, str(response.status))
            self._book.note(self._by, code, text.decode(errors="replace"))
            return None
        found: dict[str, Any] = json.loads(text)
        digest = found["system_fingerprint"] or ""
        wanted = self._known[digest][place][:num]
        is_right = found["choices"][0]["text"] == text_of(wanted)
        return found["model"], digest, is_right

    def _is_right(self, digest: str, place: int, tokens: tuple[int, ...], num: int) -> bool:
        return tokens == self._known[digest][place][:num]
