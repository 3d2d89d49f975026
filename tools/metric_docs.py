"""Writes docs/observability/metrics.md from the definitions of the services' metrics.

python -m tools.metric_docs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from adapter_store.metrics import definitions as store
from inference_svc.metrics import definitions as inference

PATH = Path(__file__).parent.parent / "docs" / "observability" / "metrics.md"

INTRODUCTION = """# Metrics

Both services serve Prometheus' text format over HTTP at `--metrics-listen`, without a token. This
page is made of the definitions in the code by `make docs`; a test sees to it that nothing else is
exported.

A histogram has the series `_bucket`, `_sum` and `_count`, a summary `_sum` and `_count`. Counters
start at 0 with their process.

However many adapters there are, a scrape has fewer than 5,000 series. In series by `adapter` the
busiest `--metrics-adapters` have one each, as `tenant/name`; requests to the base model count as
`base`, all others as `other`. When another adapter has become clearly busier, one of them loses its
series. What it had counted goes to `former`, so that sums over all series never fall; take rates
without it:

```promql
topk(10, rate(loadout_inference_adapter_generated_tokens_total{adapter!="former"}[5m]))
```

An adapter that gets its series back starts at 0 again, as after a restart, which `rate` allows for.

Two families for gateways name adapters as they come and go: `vllm:lora_adapter_loaded` and
`vllm:lora_requests_info`. A scrape has a bounded number of them, but each adapter that is loaded,
and each new set of adapters with requests, begins a series that Prometheus keeps for as long as it
keeps anything. Routers scrape the servers themselves, so drop both where Prometheus scrapes
(`metric_relabel_configs`, action `drop`), as `deploy/` does. What alerts need of them is in
`loadout_inference_residency_series` and `loadout_inference_snapshot_age_seconds`.

What the engine counts is asked of it at each scrape. One that does not answer within two seconds is
shown as it last was, and `loadout_inference_snapshot_age_seconds` grows.
"""


class Row(Protocol):
    @property
    def shown_name(self) -> str: ...
    @property
    def kind(self) -> inference.Kind | store.Kind: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def meaning(self) -> str: ...


def render() -> str:
    """The page."""
    parts = [INTRODUCTION]
    parts += _service("Inference service", inference.SECTIONS)
    parts += _service("Adapter store", store.SECTIONS)
    return "\n".join(parts)


def _service(title: str, sections: Mapping[str, Iterable[Row]]) -> list[str]:
    parts = [f"## {title}\n"]
    for name, rows in sections.items():
        parts += [f"### {name}\n", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        parts += [_line(row) for row in rows]
        parts.append("")
    return parts


def _line(row: Row) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    meaning = row.meaning.replace("|", "\\|")
    return f"| `{row.shown_name}` | {row.kind.value} | {labels} | {meaning} |"


def main() -> None:
    PATH.write_text(render())


if __name__ == "__main__":
    main()
