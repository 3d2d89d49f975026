"""`loadout top` in a pipe, of real services at work."""

from __future__ import annotations

import threading
from typing import Any

from loadout.cli.__main__ import main
from tests.system.services import Services


def test_one_look_in_a_pipe(services: Services, capfd: Any) -> None:
    services.client.register("topmost", services.source("r16"))
    services.client.complete("warm", adapter="topmost", max_tokens=2, timeout_s=60)
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            services.client.complete("busy", adapter="topmost", max_tokens=8, ignore_eos=True)

    thread = threading.Thread(target=generate)
    thread.start()
    places = ("--inference", services.inference_address, "--store", services.store_address)
    try:
        code = main(
            ["top", *places, "--inference-metrics", services.inference_metrics, "--interval", "1"]
        )
    finally:
        stop.set()
        thread.join()
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    for text in (
        "tokens/s, ",
        "p50 / p99 first token",
        "tier device",
        "store replicas  1 of 1 healthy",
        "default/topmost",
        "loads     ",
        "revision",
    ):
        assert text in out
    [busy] = [line.split() for line in out.splitlines() if line.startswith("default/topmost  ")][:1]
    assert float(busy[1]) > 0
