"""Hostile callers over gRPC and HTTP, each in an endless loop.

    python -m bench.workloads.attackers NAME TARGET

NAME is one of ATTACKERS, TARGET a JSON object with the fields of `Target`. An attacker writes a
line when it begins.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import socket
import string
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from loadout import Client
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import LoadoutError
from loadout.inference.v1 import inference_pb2 as inference_pb
from tests.support.access.policies import token_of
from tests.support.servers.http2 import Connection, message
from tests.system import attacks
from tests.system.attacked_front import CHAT, COMPLETIONS, request_head

MODEL = "bench-200m"
ATTACKER, SERVER = "attacker", "server"
"""Two tokens of one tenant; the server's token may register layouts."""
STORE = f"/{attacks.SERVICES['store'].full_name}"
BODY_BYTES = 4 << 20
NUM_CALLS = 8
NUM_STRANGERS = 200
PAUSE_S = 0.2
NUM_TOKENIZERS, TOKEN_CHARS, NUM_ADDED_CHARS = 64, 500, 95_000
LETTERS = string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses, the attacker's own image for pulls, and folders from which it makes adapters."""

    store: str
    inference: str
    http: str
    digest: str
    layout_id: str
    model_dir: str
    adapter_dir: str


def channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token_of(token)}"),)


def repeat(address: str, path: str, kind: str, body: bytes, token: str) -> None:
    """Keeps NUM_CALLS calls open, and repeats each call that ends."""

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
    """Sends texts of 64 KiB that are refused after they are tokenised."""
    service = attacks.SERVICES["inference"]
    body = attacks.delimited(4, b"1 " * 32_000)
    repeat(target.inference, f"/{service.full_name}/Generate", "unary_stream", body, ATTACKER)


def strangers(address: str, name: str) -> None:
    """Sends random calls without a token, half of them incomplete."""
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
    """Sends health watches of 60 MiB of unknown fields."""
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
    """Keeps connections open and never reads the answers of its calls."""
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
    """Posts a body on `num_calls` connections, repeatedly."""
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
    """Sends numbers that are not ids, which are refused only after parsing."""
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


def costly_tokenizers(target: Target) -> None:
    """Takes turns over more adapters than a server caches tokenizers for, each with the most added
    tokens that an adapter may have."""
    names: list[str] = []
    turns = itertools.count()

    def register() -> None:
        for number in range(NUM_TOKENIZERS):
            with tempfile.TemporaryDirectory() as folder:
                add_tokenizer(target, Path(folder, "adapter"), number)
                client.register(f"costly-{number}", Path(folder, "adapter"))
            names.append(f"costly-{number}")

    def call() -> None:
        while True:
            if not names:
                time.sleep(PAUSE_S)
                continue
            with suppress(LoadoutError):
                client.complete([1], adapter=names[next(turns) % len(names)], max_tokens=1)

    store, inference, token = target.store, target.inference, token_of(ATTACKER)
    with (
        Client(store=store, inference=inference, token=token, timeout_s=60) as client,
        ThreadPoolExecutor(NUM_CALLS) as pool,
    ):
        for _ in range(NUM_CALLS):
            pool.submit(call)
        try:
            register()
        except Exception as error:
            print(error, file=sys.stderr)
            os._exit(1)  # a refused attack measures nothing


def add_tokenizer(target: Target, folder: Path, seed: int) -> None:
    """Copies the attacker's adapter, with a tokenizer of as many long tokens as are allowed."""
    shutil.copytree(target.adapter_dir, folder)
    tokenizer = json.loads(Path(target.model_dir, "tokenizer.json").read_bytes())
    dice, first = random.Random(seed), len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] += [
        {"id": first + index, "content": "".join(dice.choices(LETTERS, k=TOKEN_CHARS))}
        for index in range(NUM_ADDED_CHARS // TOKEN_CHARS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


# --- a tenant's own costly requests, and as many plain ones ---------------------------------------

NUM_FOLLOWERS, PUSHES_PER_S, NUM_KEPT = 16, 4, 2
FOLLOWED, THEIRS = "team-x/followed", "team-x/theirs"


def generate(
    target: Target,
    num_calls: int,
    num_in: int = 32,
    adapter: str = THEIRS,
    follows: bool = False,
    n: int = 1,
    packed: bool = False,
    **sampling: Any,
) -> None:
    """Repeats requests with prompts that begin differently, so that they share no prefix."""
    service = attacks.SERVICES["inference"]
    policy = inference_pb.VERSION_POLICY_FOLLOW_RECOMPUTE if follows else None
    dice = random.Random(39)

    def body() -> bytes:
        request = inference_pb.GenerateRequest(
            adapter=adapter, n=n, packed_logprobs=packed, version_policy=policy
        )
        request.token_ids.ids.extend(dice.randrange(3, 8000) for _ in range(num_in))
        for key, value in {"max_tokens": 64, "ignore_eos": True, **sampling}.items():
            setattr(request.sampling, key, value)
        return request.SerializeToString()

    def again(call: Any) -> None:
        while True:
            try:
                for _ in call(body(), metadata=metadata(ATTACKER), timeout=60):
                    pass
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    print(error.details(), file=sys.stderr)
                    os._exit(1)  # a refused attack measures nothing
                time.sleep(PAUSE_S)

    with channel(target.inference) as open_channel, ThreadPoolExecutor(num_calls) as pool:
        call = open_channel.unary_stream(f"/{service.full_name}/Generate")
        for running in [pool.submit(again, call) for _ in range(num_calls)]:
            running.result()


def push_often(target: Target, has_pushed: threading.Event) -> None:
    """Pushes variants of an adapter with different last bits, PUSHES_PER_S times a second."""
    config = Path(target.adapter_dir, "adapter_config.json").read_bytes()
    weights = bytearray(Path(target.adapter_dir, "adapter_model.safetensors").read_bytes())
    with (
        Client(store=target.store, token=token_of(ATTACKER)) as client,
        tempfile.TemporaryDirectory() as made,
    ):
        (folder := Path(made) / "variant").mkdir()
        (folder / "adapter_config.json").write_bytes(config)
        for number in itertools.count():
            weights[-8:-4:2] = (number % 65_536).to_bytes(2, "little")
            (folder / "adapter_model.safetensors").write_bytes(weights)
            client.register(FOLLOWED, folder, ephemeral=True, keep=NUM_KEPT)
            has_pushed.set()
            time.sleep(1 / PUSHES_PER_S)


def ask_while_pushed(target: Target, follows: bool) -> None:
    has_pushed = threading.Event()
    threading.Thread(target=push_often, args=(target, has_pushed), daemon=True).start()
    has_pushed.wait()
    generate(target, NUM_FOLLOWERS, adapter=FOLLOWED, follows=follows, max_tokens=512)


_LONG: dict[str, Any] = {"num_calls": 8, "num_in": 2000, "max_tokens": 4}
_MANY: dict[str, Any] = {"num_calls": 64, "num_in": 4}
COSTLY: dict[str, tuple[Callable[[Target], None], Callable[[Target], None]]] = {
    "engine: followers and four pushes a second": (
        partial(ask_while_pushed, follows=True),
        partial(ask_while_pushed, follows=False),
    ),
    "engine: 64 calls of four long answers": (
        partial(generate, **_MANY, n=4, max_tokens=2040),
        partial(generate, **_MANY),
    ),
    "engine: 128 answers with 1,024 log probabilities": (
        partial(generate, num_calls=1, n=128, packed=True, logprobs=1024, temperature=1.0),
        partial(generate, num_calls=128, temperature=1.0),
    ),
    "engine: long prompts that are scored": (
        partial(generate, **_LONG, prompt_logprobs=1024),
        partial(generate, **_LONG),
    ),
    "engine: processed log probabilities": (
        partial(
            generate,
            num_calls=64,
            logprobs=20,
            logprobs_mode=inference_pb.LOGPROBS_MODE_PROCESSED,
            temperature=1.0,
            top_p=0.9,
        ),
        partial(generate, num_calls=64, temperature=1.0),
    ),
    "inference: costly tokenizers": (
        costly_tokenizers,
        partial(generate, num_calls=NUM_CALLS, num_in=1, max_tokens=1),
    ),
    "engine: top_p that sorts the vocabulary": (
        partial(generate, num_calls=64, temperature=1.0, top_p=0.999),
        partial(generate, num_calls=64, temperature=1.0),
    ),
}
"""Pairs of a costly attack and plain requests. A tenant may use its part of the machine, so other
tenants' figures are compared with as many plain requests of that tenant (with as many pushes, if
the attack pushes)."""
PLAIN = "plain requests beside "


# --- storms of callers without a token ------------------------------------------------------------


def metadata_storm(target: Target) -> None:
    """Sends calls with 15 KiB of metadata on 64 connections."""
    attacks.metadata_storm(target.store, f"{STORE}/GetAdapter", math.inf)


def store_resets(target: Target) -> None:
    """Resets calls as soon as they begin."""
    attacks.reset_storm(target.store, f"{STORE}/GetAdapter", math.inf)


def inference_resets(target: Target) -> None:
    service = attacks.SERVICES["inference"]
    attacks.reset_storm(target.inference, f"/{service.full_name}/Generate", math.inf)


def half_handshakes(target: Target) -> None:
    """Opens 1,900 connections at once and sends half a TLS hello on each, repeatedly. The services
    here have no TLS; tests/system/test_attacks.py does the same to a service with TLS."""
    while True:
        attacks.half_handshakes(target.store, rounds=1)


def compute(target: Target) -> None:
    """Attacks nothing, to show the effect of an attacker's processor time on others that share a
    core with it."""
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
    "store: metadata on 64 connections": metadata_storm,
    "store: rapid resets": store_resets,
    "store: half handshakes": half_handshakes,
    "inference: rapid resets": inference_resets,
    "http: metadata of 4 MiB": large_metadata,
    "http: prompts of 4 MiB": long_prompts,
    "http: bodies that are too large": too_large_bodies,
    "http: numbers of 4 MiB": large_numbers,
    "http: 30,000 messages": many_messages,
    "http: half-sent bodies": half_sent_bodies,
    "http: half-sent headers": half_sent_headers,
    **{name: costly for name, (costly, _) in COSTLY.items()},
}

STRANGERS = {
    *("store: strangers", "store: watches of 60 MiB", "inference: strangers"),
    *("store: metadata on 64 connections", "store: rapid resets", "store: half handshakes"),
    "inference: rapid resets",
    "http: half-sent headers",
}
"""Attackers without a token."""


def main() -> None:
    name, target = sys.argv[1:]
    print("begins", flush=True)
    plain = {f"{PLAIN}{each}": beside for each, (_, beside) in COSTLY.items()}
    (ATTACKERS | plain)[name](Target(**json.loads(target)))


if __name__ == "__main__":
    main()
