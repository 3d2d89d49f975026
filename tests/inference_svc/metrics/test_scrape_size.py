"""However many adapters there are, a scrape stays small, and right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from inference_svc.core import ANYONE
from inference_svc.engine.control.status_types import ResidentAdapter
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.metrics.requests import MAX_ADAPTERS, RequestEnd
from tests.inference_svc.directories import UPPER, A, make, run
from tests.support.inference.scrapes import MAX_SERIES
from tests.support.inference.serving import Running

NUM_ADAPTERS = 10_000
PREFIX = "loadout_inference_"
LOADED = "vllm:lora_adapter_loaded{"


def read(text: str) -> tuple[int, dict[str, float]]:
    """How many series, and the requests by adapter."""
    num_series, requests = 0, {}
    for family in text_string_to_metric_families(text):
        num_series += len(family.samples)
        if family.name == f"{PREFIX}adapter_requests":
            requests = {sample.labels["adapter"]: sample.value for sample in family.samples}
    return num_series, requests


def test_ten_thousand_adapters_are_few_series(serve: Any, engine: Any) -> None:
    """vllm#11117: all resident in the host tier, each used by a request, and all removed."""
    for number in range(NUM_ADAPTERS):
        digest = f"sha256:{number:064}"
        engine.resident[digest] = ResidentAdapter(digest, "host", 640, 8, False, 0, 1.0, 0.25)

    async def body(running: Running) -> None:
        metrics = running.server._metrics
        end = RequestEnd("stop", (), 3, 1.0, Usage(3, 0, 3), Timings(0.1, 0.0, 0.2))
        for number in range(NUM_ADAPTERS):
            metrics.count_request(replace(end, adapters=(f"team-{number % 100}/a{number}",)))
        num_series, requests = read(await asyncio.to_thread(running.scrape))
        assert num_series < MAX_SERIES
        assert len(requests) == MAX_ADAPTERS + len(("base", "other", "former"))
        assert sum(requests.values()) == NUM_ADAPTERS
        assert requests["other"] == NUM_ADAPTERS - MAX_ADAPTERS
        assert LOADED in await asyncio.to_thread(running.scrape)
        engine.resident.clear()
        text = await asyncio.to_thread(running.scrape)
        assert LOADED not in text
        assert read(text)[0] < num_series

    serve(body)


def test_a_setting_bounds_the_named_adapters(serve: Any) -> None:
    async def body(running: Running) -> None:
        for number in range(10):
            running.server._metrics.count_request(RequestEnd("error", (f"t/a{number}",), 0, 1.0))
        _, requests = read(await asyncio.to_thread(running.scrape))
        assert requests == {"t/a0": 1, "t/a1": 1, "base": 0, "other": 8, "former": 0}

    serve(body, metrics_adapters=2)


def test_few_names_of_an_adapter_are_shown() -> None:
    catalog, directory, _ = make()
    names = [f"default/n{number:03}" for number in range(200)]
    catalog.records |= {name: replace(UPPER, name=name) for name in names}

    async def body() -> None:
        for name in names:
            await directory.resolve(ANYONE, name)
        assert directory.names_of(ANYONE, A) == names
        assert directory.names_of(ANYONE, A, 3) == names[:3]

    run(body)
