"""Reading metrics as a scraper does."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from loadout.errors import Unavailable
from loadout.prometheus import parse, scrape


def test_scrape_of_a_real_endpoint():
    registry = CollectorRegistry()
    hits = Counter("hits", "x", ["tier"], registry=registry)
    hits.labels("memory").inc(3)
    hits.labels("disk").inc(4)
    Histogram("wait_seconds", "x", registry=registry).observe(0.5)
    server, thread = start_http_server(0, "127.0.0.1", registry=registry)
    metrics = scrape(f"127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join()
    assert metrics.sum("hits_total") == 7
    assert metrics.sum("hits_total", tier="disk") == 4
    assert metrics.sum("wait_seconds_count") == 1
    assert metrics.sum("absent") == 0


def test_names_with_colons():
    metrics = parse('vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b"} 1.5\n')
    [sample] = metrics.select("vllm:lora_requests_info")
    assert sample.labels == {"max_lora": "4", "running_lora_adapters": "a,b"}


def test_nobody_there():
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: Connection refused; is it the "):
        scrape("127.0.0.1:1")
