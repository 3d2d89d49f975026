"""One trace from an application through both services, whatever becomes of the request."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import urllib.request
from typing import Any

import pytest

from loadout.errors import DeadlineExceeded, NotFound
from tests.support.access.policies import token_of
from tests.support.servers.otlp import Received, Trace
from tests.support.wait import until
from tests.system.observed import Observed
from tests.system.secretive import HELD, LOOK_SECRET, fail_with

SERVER, STORE = "loadout-inference", "loadout-store"
WARM = """
    app
      client Generate
        server Generate
          resolve
          tokenize
          text_completion llama
            queue
            prefill
            decode
"""
COLD = """
    app
      client Generate
        server Generate
          resolve
          tokenize
          text_completion llama
            queue
              adapter_wait
            load
              wait
              pull
                client PullAdapter
                  server PullAdapter
                    wait
                    stream
                wait
            prefill
            decode
"""


@pytest.fixture(scope="module")
def traced(observed: Observed) -> Observed:
    """With two adapters, of which the services know the names."""
    for name in ("r3", "r16"):
        observed.register(f"traced/{name}", name)
        with observed.plain() as client:
            client.complete("abc", adapter=f"traced/{name}", max_tokens=1)
    return observed


def unload(system: Observed, *names: str) -> None:
    with system.plain() as client:
        for name in names:
            client.unload(f"traced/{name}")


def check_nested(trace: Trace) -> None:
    """Each span lies within its parent; all clocks are this machine's."""
    for span in trace.spans:
        parent = trace.parent(span)
        # What is left behind ends when it hears of that.
        may_last = span.name.startswith("server ") or "loadout.cancelled" in span.attributes
        if parent is not None:
            assert parent.start <= span.start <= span.end, span
            assert may_last or span.lies_in(parent), (span, parent)


def generation(trace: Trace) -> Received:
    return trace.one("text_completion llama", SERVER)


def test_a_cold_adapter(traced: Observed) -> None:
    unload(traced, "r3")
    with traced.request() as trace_id:
        done = traced.client.complete(
            "abc", adapter="traced/r3", request_id="cold-1", max_tokens=8, ignore_eos=True
        )
    assert done.adapter is not None
    digest = done.adapter.digest
    trace = traced.receiver.trace(trace_id, COLD)
    check_nested(trace)
    assert not [span for span in trace.spans if span.error]
    about = {
        "loadout.request_id": "cold-1",
        "loadout.tenant": "default",
        "loadout.adapter": "traced/r3@1",
        "loadout.digest": digest,
    }
    for span in (trace.one("Generate", SERVER), generation(trace)):
        assert about.items() <= span.attributes.items()
    usage = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "llama",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert usage.items() <= generation(trace).attributes.items()
    load, pull = trace.one("load"), trace.one("PullAdapter", STORE)
    num_bytes = load.attributes["loadout.bytes"]
    assert num_bytes > 0
    attempt = trace.one("PullAdapter", SERVER).attributes
    assert attempt["loadout.replica"] == traced.store_address
    sent = trace.one("stream")
    assert attempt["loadout.bytes"] == sent.attributes["loadout.bytes"] == num_bytes
    for span in (load, pull):
        assert span.attributes["loadout.digest"] == digest
    wait = trace.one("adapter_wait")
    assert load.lies_in(generation(trace))
    assert wait.start <= load.start
    assert wait.end <= trace.one("prefill").start
    assert trace.one("Generate", "app").attributes["loadout.adapter"] == "traced/r3"


def test_a_warm_adapter(traced: Observed) -> None:
    with traced.request() as trace_id:
        traced.client.complete("abc", adapter="traced/r3", max_tokens=8, ignore_eos=True)
    trace = traced.receiver.trace(trace_id, WARM)
    check_nested(trace)
    phases = [trace.one(name) for name in ("queue", "prefill", "decode")]
    assert phases[0].start == generation(trace).start
    assert phases[2].end == generation(trace).end
    for before, after in itertools.pairwise(phases):
        assert abs(before.end - after.start) <= 1000, "one phase begins where the last one ends"


def test_http_takes_the_callers_trace(traced: Observed) -> None:
    trace_id, caller = "ab" * 16, "cd" * 8
    request = urllib.request.Request(
        f"http://{traced.http_address}/v1/completions",
        json.dumps({"model": "traced/r3", "prompt": "abc", "max_tokens": 4, "n": 2}).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {token_of('root')}",
            "traceparent": f"00-{trace_id}-{caller}-01",
            "x-request-id": "over-http",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200
    trace = traced.receiver.trace(
        trace_id,
        """
        server POST /v1/completions
          resolve
          tokenize
          text_completion llama
            queue
            prefill
            decode
          text_completion llama
            queue
            prefill
            decode
        """,
    )
    check_nested(trace)
    server = trace.one("completions")
    assert server.parent_id == caller
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["http.route"] == "/v1/completions"
    ids = {span.attributes["loadout.request_id"] for span in trace.all("llama")}
    assert ids == {"over-http-0", "over-http-1"}


def test_an_http_stream_whose_client_disconnects(traced: Observed) -> None:
    trace_id = "bc" * 16
    host, _, port = traced.http_address.rpartition(":")
    body = {"model": "traced/r3", "prompt": "abc", "max_tokens": 240, "stream": True}
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {token_of('root')}",
        "traceparent": f"00-{trace_id}-{'de' * 8}-01",
    }
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), headers)
    with connection.getresponse() as response:
        assert response.readline().startswith(b"data: ")
    connection.close()
    trace = traced.receiver.trace_with(trace_id, "server POST /v1/completions")
    trace = traced.receiver.trace_with(trace_id, "text_completion llama", "decode")
    check_nested(trace)
    assert not [span for span in trace.spans if span.error]
    for span in (trace.one("completions"), generation(trace)):
        assert span.attributes["loadout.cancelled"] is True


def cut_off(system: Observed, **options: Any) -> None:
    """Reads one chunk, and drops the stream."""
    for _ in system.client.generate("abc", adapter="traced/r3", ignore_eos=True, **options):
        break


def test_a_cancelled_stream(traced: Observed) -> None:
    with traced.request() as trace_id:
        cut_off(traced, max_tokens=240)
    trace = traced.receiver.trace(trace_id, WARM)
    check_nested(trace)
    assert not [span for span in trace.spans if span.error], "nothing has failed"
    spans = [trace.one("Generate", "app"), trace.one("Generate", SERVER), generation(trace)]
    for span in spans:
        assert span.attributes["loadout.cancelled"] is True
    for span in spans[:2]:
        assert span.attributes["rpc.response.status_code"] == "CANCELLED"
    assert 0 < generation(trace).attributes["gen_ai.usage.output_tokens"] < 240
    assert trace.one("decode").end == generation(trace).end
    assert trace.one("app").end >= trace.one("Generate", "app").end


def test_a_deadline(traced: Observed) -> None:
    """A deadline may pass while the request waits for its adapter."""
    unload(traced, "r3")
    with traced.frozen_store(), traced.request() as trace_id, pytest.raises(DeadlineExceeded):
        traced.client.complete("abc", adapter="traced/r3", timeout_s=2.0)
    trace = traced.receiver.trace_with(
        trace_id, "app", "server Generate", "text_completion llama", "load"
    )
    check_nested(trace)
    for span in (trace.one("Generate", "app"), trace.one("Generate", SERVER), generation(trace)):
        assert span.error == "DEADLINE_EXCEEDED", span
    assert not trace.all("prefill")
    assert trace.one("adapter_wait").lies_in(trace.one("queue"))
    assert trace.one("load").attributes["loadout.cancelled"] is True
    assert not trace.one("PullAdapter", SERVER).error


def test_an_unknown_adapter(traced: Observed) -> None:
    with traced.request() as trace_id, pytest.raises(NotFound):
        traced.client.complete("abc", adapter="traced/nobody")
    trace = traced.receiver.trace(
        trace_id,
        """
        app
          client Generate
            server Generate
              resolve
                server GetAdapter
        """,
    )
    check_nested(trace)
    assert trace.one("Generate", "app").error == "ADAPTER_NOT_FOUND"
    assert trace.one("resolve").error == "ADAPTER_NOT_FOUND"
    for service, name in ((SERVER, "Generate"), (STORE, "GetAdapter")):
        span = trace.one(name, service)
        assert not span.error, "the mistake is the caller's"
        assert span.attributes["rpc.response.status_code"] == "NOT_FOUND"


def test_spans_hold_no_secrets(traced: Observed) -> None:
    num_before = len(traced.receiver.spans)
    for text in LOOK_SECRET.values():
        fail_with(traced.client, text)
    with traced.request() as trace_id, pytest.raises(NotFound):
        traced.client.complete("abc", adapter="traced/nobody")
    for service in (SERVER, STORE):  # each sends its spans in order
        traced.receiver.until(lambda service=service: service in _services(traced, trace_id))
    sent = [each for each in traced.receiver.spans[num_before:] if each.service in (SERVER, STORE)]
    shown = repr(sent)
    assert "X-Amz-Signature=***" in shown
    assert [secret for secret in HELD if secret in shown] == []


def _services(system: Observed, trace_id: str) -> set[str]:
    """Whose spans of this trace have come."""
    return {span.service for span in system.receiver.spans if span.trace_id == trace_id}


def test_two_requests_wait_for_one_load(traced: Observed) -> None:
    unload(traced, "r16")
    ids: list[str] = []

    def ask() -> None:
        with traced.request() as trace_id:
            ids.append(trace_id)
            traced.client.complete("abc", adapter="traced/r16", max_tokens=4, ignore_eos=True)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    with traced.frozen_store():
        for num_waiting, thread in enumerate(threads, 1):
            thread.start()
            # The first is in the queue, and its load has begun, before the second comes.
            until(lambda wanted=num_waiting: traced.num_waiting() == wanted)
    for thread in threads:
        thread.join()
    first = traced.receiver.trace(ids[0], COLD)
    waited = WARM.replace("queue\n", "queue\n              adapter_wait\n")
    second = traced.receiver.trace(ids[1], waited)
    load = first.one("load")
    assert second.one("adapter_wait").links == ((load.trace_id, load.span_id),)
    assert first.one("adapter_wait").links == ()
    assert load.end <= second.one("prefill").start


def test_a_registration(traced: Observed) -> None:
    with traced.request() as trace_id:
        traced.client.register("traced/new", traced.source("r33"))
    trace = traced.receiver.trace(
        trace_id,
        """
        app
          client RegisterAdapter
            server RegisterAdapter
              fetch
              check
              commit
              plan
              compile
              keep
        """,
    )
    server = trace.one("RegisterAdapter", STORE)
    for name in ("fetch", "check", "commit"):
        assert trace.one(name).lies_in(server)
    assert server.attributes["loadout.adapter"] == "traced/new"
    assert trace.one("fetch").attributes["loadout.scheme"] == "file"
    compiled = trace.one("compile").attributes
    assert compiled["loadout.source"] == "blob"
    assert compiled["loadout.digest"] == server.attributes["loadout.digest"]


def test_an_operators_load(traced: Observed) -> None:
    unload(traced, "r3")
    with traced.request() as trace_id:
        traced.client.load("traced/r3")
    trace = traced.receiver.trace(
        trace_id,
        """
        app
          client LoadAdapter
            server LoadAdapter
              load
                wait
                pull
                  client PullAdapter
                    server PullAdapter
                      wait
                      stream
                  wait
        """,
    )
    check_nested(trace)


def test_prompts_are_in_no_trace(traced: Observed) -> None:
    with traced.request() as trace_id:
        traced.client.complete("zebra crossing", adapter="traced/r3", max_tokens=4)
    traced.receiver.trace_with(trace_id, "decode", "server Generate")
    assert "zebra" not in repr(traced.receiver.spans)
    assert token_of("root") not in repr(traced.receiver.spans)
