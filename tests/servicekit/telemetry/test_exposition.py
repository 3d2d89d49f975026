"""The text format: byte for byte what prometheus_client writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from servicekit.telemetry.exposition import exposition, write_text
from servicekit.telemetry.histogram import HistogramState
from servicekit.telemetry.metrics import Definitions, MetricRegistry, Namespace, ScrapeCollector

OWN = Namespace("service_")
DEFINITIONS = Definitions(
    "service_",
    {
        "All kinds": (
            OWN.counter("calls", 'Calls, "quoted",\nwith a \\.', "method", "code"),
            OWN.gauge("size_bytes", "Size.", "name"),
            OWN.histogram("call_seconds", "Time of calls.", "method", bounds_s=(0.1, 2.5)),
            OWN.summary("wait_seconds", "Time of waits.", "zone", "area"),
            Namespace().gauge("gateway:queue", "Queue length."),
        ),
    },
)
VALUES = st.floats() | st.integers(0, 2**63)
COUNTS = st.tuples(*(st.integers(0, 2**40),) * 3)


@st.composite
def families(draw: st.DrawFn) -> list[Metric]:
    label = st.text(max_size=20)
    pairs = draw(st.dictionaries(st.tuples(label, label), VALUES, max_size=4))
    waits = DEFINITIONS.family("wait_seconds")
    for labels, value in pairs.items():
        waits.add_metric(labels, 1, value)
    states = draw(st.dictionaries(st.tuples(label), COUNTS, max_size=3))
    histograms = {
        labels: HistogramState((0.1, 2.5), counts, draw(VALUES))
        for labels, counts in states.items()
    }
    return [
        DEFINITIONS.samples("calls", pairs),
        DEFINITIONS.samples("size_bytes", draw(st.dictionaries(st.tuples(label), VALUES))),
        DEFINITIONS.histograms("call_seconds", histograms),
        waits,
        DEFINITIONS.sample("gateway:queue", draw(VALUES)),
    ]


@given(families())
def test_families_that_are_read(made: list[Metric]) -> None:
    registry = CollectorRegistry()
    registry.register(ScrapeCollector(lambda: made))
    assert write_text(made) == generate_latest(registry)


def test_metrics_that_are_counted() -> None:
    registry = MetricRegistry(DEFINITIONS)
    registry.counter("calls").labels("a", "OK").inc(3)
    registry.histogram("call_seconds").labels('"b"\\').observe(0.5)
    registry.gauge("gateway:queue").set(1e9)
    ours, theirs = exposition(registry)[0], generate_latest(registry)
    # What is told of the process changes from one moment to the next.
    assert len(lines(ours)) > 10
    assert lines(ours) == lines(theirs)


def lines(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if not line.startswith("process_")]
