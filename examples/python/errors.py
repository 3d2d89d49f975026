"""Shows the errors that are worth a retry, and the errors that the client retries by itself."""

from __future__ import annotations

import os
import time

from loadout import Client
from loadout.errors import (
    FailedPrecondition,
    InvalidArgument,
    LoadoutError,
    NotFound,
    ResourceExhausted,
    StreamLost,
)
from loadout.retry import RetryPolicy

INFERENCE = os.environ.get("LOADOUT_INFERENCE", "127.0.0.1:7080")
TOKEN = os.environ.get("LOADOUT_TOKEN")

# The client itself retries after lost connections, draining servers and full queues, within
# `timeout_s`, if a second execution does no harm.
RETRY = RetryPolicy(max_attempts=3, first_backoff_s=0.2)


def generate(client: Client, prompt: str, adapter: str, attempts: int = 3) -> str:
    """Generates, and starts again if the connection is lost halfway."""
    for attempt in range(attempts):
        try:
            answer = client.complete(prompt, adapter=adapter, temperature=0, timeout_s=30)
            return answer.text
        except StreamLost:
            if attempt == attempts - 1:
                raise
        except ResourceExhausted as error:
            time.sleep(error.retry_after_s or 1.0)
    raise AssertionError("at least one attempt")


def main() -> None:
    with Client(inference=INFERENCE, token=TOKEN, retry=RETRY) as client:
        print(generate(client, "loadout=", "upper"))
        for adapter, temperature in (("nothing-here", 0.0), ("upper", -1.0)):
            try:
                client.complete("loadout=", adapter=adapter, temperature=temperature)
            except NotFound as error:
                print(f"no such adapter: {error.subject or adapter} ({error.reason})")
            except InvalidArgument as error:
                print(f"bad argument {error.subject}: {error}")
            except FailedPrecondition as error:
                print(f"this model cannot serve it: {error}")
            except LoadoutError as error:
                print(f"{type(error).__name__} {error.code} {error.reason}: {error}")

    with Client(inference="127.0.0.1:1", retry=RetryPolicy(max_attempts=1)) as client:
        try:
            client.server_info()
        except StreamLost:
            print("nothing answers at 127.0.0.1:1")


if __name__ == "__main__":
    main()
