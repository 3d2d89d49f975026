"""Calls a method again and again, several at once and at the lowest priority, until its standard
input ends. Then it cancels the calls that have no answer yet, or awaits theirs: a service may let
them wait for ten seconds. Prints a line once it has got an answer, and at the end how often each
code came, and of UNAVAILABLE the text."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path

import grpc

NUM_CALLS = 8
CANCELS, AWAITS = "cancels", "awaits"


def main(address: str, token: str, path: str, kind: str, body_file: str, end: str) -> None:
    os.nice(19)
    body = Path(body_file).read_bytes()
    metadata = (("authorization", f"Bearer {token}"),)
    codes: Counter[str] = Counter()
    begun, ends = threading.Event(), threading.Event()
    calls: dict[int, grpc.Call] = {}

    def wait() -> None:
        sys.stdin.read()
        ends.set()
        for made in list(calls.values()) if end == CANCELS else ():
            made.cancel()

    threading.Thread(target=wait, daemon=True).start()
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        call = getattr(channel, kind)(path)

        def repeat() -> None:
            while not ends.is_set():
                sent = iter([body]) if kind.startswith("stream") else body
                made = calls[threading.get_ident()] = call(sent, metadata=metadata, timeout=60)
                if ends.is_set() and end == CANCELS:
                    made.cancel()
                try:
                    for _ in made:
                        pass
                except grpc.RpcError:
                    pass
                code = made.code().name
                if code == "CANCELLED" and ends.is_set():
                    break  # by us
                codes[f"{code} {made.details()}" if code == "UNAVAILABLE" else code] += 1
                begun.set()

        threads = [threading.Thread(target=repeat) for _ in range(NUM_CALLS)]
        for thread in threads:
            thread.start()
        begun.wait()
        print("begun", flush=True)
        for thread in threads:
            thread.join()
    for code, number in codes.items():
        print(number, code)


if __name__ == "__main__":
    main(*sys.argv[1:])
