"""Callers that mean harm, over gRPC and HTTP, each a loop that never ends by itself.

    python -m bench.attackers NAME TARGET

NAME is one of ATTACKERS, TARGET a JSON object of what `Target` has. Writes a line once it begins.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from tests.adapter_store.service.guarded import token_of
from tests.support.http2 import Connection, message
from tests.system import attacks
from tests.system.attacked_front import CHAT, COMPLETIONS, request_head

MODEL = "bench-200m"
ATTACKER, SERVER = "attacker", "server"
"""Tokens of one tenant; the server's may register layouts."""
STORE = f"/{attacks.SERVICES['store'].full_name}"
BODY_BYTES = 4 << 20
NUM_CALLS = 8
NUM_STRANGERS = 200
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses, and an image of the attacker's own, for pulls."""

    store: str
    inference: str
    http: str
    digest: str
    layout_id: str


def channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token_of(token)}"),)


def repeat(address: str, path: str, kind: str, body: bytes, token: str) -> None:
    """NUM_CALLS calls at once; each that ends is made again."""

    def again(call: Any) -> None:
        while True:
            sent = iter([body]) if kind.startswith("stream") else body
            made = call(sent, metadata=metadata(token), timeout=60)
            with suppress(grpc.RpcError):
                for _ in made:
                    pass

    with channel(address) as open_channel, ThreadPoolExecutor(NUM_CALLS) as pool:
        call = getattr(open_channel, kind)(path)
        for running in [pool.submit(again, call) for _ in range(NUM_CALLS)]:
            running.result()


def messages(name: str) -> Callable[[Target], None]:
    sent = attacks.MESSAGES[name]
    service = attacks.SERVICES[sent.service]
    method = service.methods_by_name[sent.method]
    kind = f"{'stream' if method.client_streaming else 'unary'}_stream"

    def run(target: Target) -> None:
        address = target.store if sent.service == "store" else target.inference
        repeat(address, f"/{service.full_name}/{sent.method}", kind, sent.make(), sent.token)

    return run


def too_many_tokens(target: Target) -> None:
    """Texts of 64 KiB that are refused once they are tokenised."""
    service = attacks.SERVICES["inference"]
    body = attacks.delimited(4, b"1 " * 32_000)
    repeat(target.inference, f"/{service.full_name}/Generate", "unary_stream", body, ATTACKER)


def strangers(address: str, name: str) -> None:
    """Whatever callers without a token can send, half of it never whole."""
    dice = random.Random(14)
    plan = [*attacks.paths_of(name), *[f"{attacks.HEALTH}/Watch"] * 5]
    with ExitStack() as stack:
        held: deque[Connection] = deque()
        while True:
            with suppress(OSError):
                held.append(attacks.stray_calls(address, dice.choice(plan), dice))
                stack.callback(held[-1].__exit__)
            while len(held) > NUM_STRANGERS:
                held.popleft().__exit__()


def large_watches(target: Target) -> None:
    """Health watches of 60 MiB, of fields that nobody knows."""
    body = b"\x12" + b"\x80\x80\x80\x1e" + bytes(60 << 20)
    while True:
        with ExitStack() as stack, suppress(OSError):
            for _ in range(12):
                connection = stack.enter_context(Connection(target.store))
                connection.receive(0.05)
                stream = connection.call(f"{attacks.HEALTH}/Watch")
                connection.send(stream, message(body), end=True)


def trickling_uploads(target: Target) -> None:
    def chunks(name: str) -> Iterator[bytes]:
        meta = store_pb.UploadMeta(name=name)
        yield store_pb.UploadAdapterRequest(meta=meta).SerializeToString()
        for _ in itertools.count():
            time.sleep(PAUSE_S)
            chunk = store_pb.FileChunk(file_name="adapter_config.json")
            yield store_pb.UploadAdapterRequest(chunk=chunk).SerializeToString()

    with channel(target.store) as open_channel:
        call = open_channel.stream_unary(f"{STORE}/UploadAdapter")
        while True:
            running = [
                call.future(chunks(f"u{number}"), metadata=metadata(ATTACKER))
                for number in range(64)
            ]
            for each in running:
                each.code()


def dripping_sources(target: Target) -> None:
    request = store_pb.RegisterAdapterRequest(name="slow", source_uri="s3://bucket/slow")
    body = request.SerializeToString()
    with channel(target.store) as open_channel:
        call = open_channel.unary_unary(f"{STORE}/RegisterAdapter")
        while True:
            running = [call.future(body, metadata=metadata(ATTACKER)) for _ in range(64)]
            for each in running:
                each.code()


def unread(address: str, path: str, body: bytes) -> None:
    """Calls whose answers are never read, on connections that stay open."""
    with ExitStack() as stack:
        while True:
            with suppress(OSError):
                connection = stack.enter_context(Connection(address, window=0))
                connection.receive(0.05)
                for _ in range(100):
                    stream = connection.call(path, authorization=f"Bearer {token_of(ATTACKER)}")
                    connection.send(stream, message(body), end=True)
            time.sleep(PAUSE_S)


def unread_pulls(target: Target) -> None:
    request = store_pb.PullAdapterRequest(digest=target.digest, layout_id=target.layout_id)
    unread(target.store, f"{STORE}/PullAdapter", request.SerializeToString())


def unread_pages(target: Target) -> None:
    body = store_pb.ListAdaptersRequest().SerializeToString()
    unread(target.store, f"{STORE}/ListAdapters", body)


def posts(target: Target, path: str, body: bytes, num_calls: int) -> None:
    """Posts a body on so many connections, again and again."""
    host, _, port = target.http.rpartition(":")
    whole = request_head(path, len(body), ATTACKER) + body
    while True:
        with ExitStack() as stack, suppress(OSError):
            held = [
                stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                for _ in range(num_calls)
            ]
            for connection in held:
                connection.sendall(whole)
            for connection in held:
                connection.recv(1 << 16)


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 1, **fields}).encode()


def large_metadata(target: Target) -> None:
    many = [{"b": 0}] * (BODY_BYTES // 10 - 100)
    posts(target, COMPLETIONS, body_of(prompt="1 ", metadata={"a": many}), 60)


def too_large_bodies(target: Target) -> None:
    posts(target, COMPLETIONS, body_of(prompt="1 " * (BODY_BYTES // 2)), 60)


def long_prompts(target: Target) -> None:
    posts(target, COMPLETIONS, body_of(prompt="12 " * (BODY_BYTES // 3 - 100)), 20)


def large_numbers(target: Target) -> None:
    """Numbers that are not ids: refused only once they are parsed."""
    posts(target, COMPLETIONS, body_of(prompt=[1.5] * (BODY_BYTES // 5 - 100)), 20)


def many_messages(target: Target) -> None:
    turns = [{"role": "user", "content": "1 "}] * 30_000
    posts(target, CHAT, body_of(messages=turns), 20)


def half_sent(target: Target, head: bytes) -> None:
    host, _, port = target.http.rpartition(":")
    while True:
        with ExitStack() as stack:
            for _ in range(600):
                with suppress(OSError):
                    connection = socket.create_connection((host, int(port)), timeout=5)
                    stack.enter_context(connection)
                    connection.sendall(head)
            time.sleep(1)


def half_sent_bodies(target: Target) -> None:
    half_sent(target, request_head(COMPLETIONS, 1000, ATTACKER) + b'{"model":')


def half_sent_headers(target: Target) -> None:
    half_sent(target, b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 30_000)


def compute(target: Target) -> None:
    """No attack: what its own processor time does to others, where two share a core."""
    while True:
        sum(range(1 << 16))


ATTACKERS: dict[str, Callable[[Target], None]] = {
    "none: computes only": compute,
    **{f"{each.service}: {name}": messages(name) for name, each in attacks.MESSAGES.items()},
    "inference: texts of too many tokens": too_many_tokens,
    "store: strangers": lambda target: strangers(target.store, "store"),
    "store: watches of 60 MiB": large_watches,
    "store: trickling uploads": trickling_uploads,
    "store: dripping sources": dripping_sources,
    "store: pulls that nobody reads": unread_pulls,
    "store: pages that nobody reads": unread_pages,
    "inference: strangers": lambda target: strangers(target.inference, "inference"),
    "http: metadata of 4 MiB": large_metadata,
    "http: prompts of 4 MiB": long_prompts,
    "http: bodies that are too large": too_large_bodies,
    "http: numbers of 4 MiB": large_numbers,
    "http: 30,000 messages": many_messages,
    "http: half-sent bodies": half_sent_bodies,
    "http: half-sent headers": half_sent_headers,
}

STRANGERS = {
    *("store: strangers", "store: watches of 60 MiB", "inference: strangers"),
    "http: half-sent headers",
}
"""Those without a token."""


def main() -> None:
    name, target = sys.argv[1:]
    print("begins", flush=True)
    ATTACKERS[name](Target(**json.loads(target)))


if __name__ == "__main__":
    main()
