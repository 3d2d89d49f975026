"""Generates docs/observability/metrics.md from the services' definitions of their metrics.

python -m tools.pages.metric_docs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from adapter_store.metrics.definitions import SECTIONS as STORE_SECTIONS
from inference_svc.metrics.definitions import SECTIONS as INFERENCE_SECTIONS
from servicekit.telemetry.metrics import Definition

PATH = Path(__file__).parents[2] / "docs" / "observability" / "metrics.md"

INTRODUCTION = """# Metrics

This page lists every metric that you can scrape from the two services. Both serve Prometheus' text
format over HTTP at `--metrics-listen`, without a token. `make docs` generates the page from the
definitions in the code, and a test checks that nothing else is exported.

A histogram has the series `_bucket`, `_sum` and `_count`, a summary `_sum` and `_count`. Counters
start at 0 with their process.

**Series by adapter.** A scrape has fewer than 5,600 series, however many adapters you have. In
metrics with the label `adapter`, the busiest `--metrics-adapters` have their own series, as
`tenant/name`. Requests to the base model count as `base`, all others as `other`. When another
adapter becomes clearly busier, it replaces one of them. The counts of the replaced adapter move to
`former`, so that sums over all series never fall. Take rates without it:

```promql
topk(10, rate(loadout_inference_adapter_generated_tokens_total{adapter!="former"}[5m]))
```

An adapter that gets its series back starts at 0, as after a restart; `rate` handles this.

**Metrics to drop.** `vllm:lora_adapter_loaded` and `vllm:lora_requests_info`, for gateways, name
the adapters themselves. Each scrape has a bounded number of these series. But each newly loaded
adapter, and each new set of adapters with requests, starts a series that Prometheus keeps for its
whole retention time. Routers scrape the servers themselves, so drop both in your Prometheus
(`metric_relabel_configs`, action `drop`), as `deploy/` does. Alerts use
`loadout_inference_residency_series` and `loadout_inference_snapshot_age_seconds` instead.

**When the engine is busy.** Each scrape asks the engine for its values. If the engine does not
answer within two seconds, you get the previous values, and
`loadout_inference_snapshot_age_seconds` grows.
"""


def render() -> str:
    parts = [INTRODUCTION]
    parts += _service("Inference service", INFERENCE_SECTIONS)
    parts += _service("Adapter store", STORE_SECTIONS)
    return "\n".join(parts)


def _service(title: str, sections: Mapping[str, Iterable[Definition]]) -> list[str]:
    parts = [f"## {title}\n"]
    for name, rows in sections.items():
        parts += [f"### {name}\n", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        parts += [_line(row) for row in rows]
        parts.append("")
    return parts


def _line(row: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    meaning = row.help.replace("|", "\\|")
    return f"| `{row.exposed_name}` | {row.kind.value} | {labels} | {meaning} |"


def main() -> None:
    PATH.write_text(render())


if __name__ == "__main__":
    main()
