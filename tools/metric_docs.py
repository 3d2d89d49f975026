"""Generates docs/observability/metrics.md from the services' definitions of their metrics.

python -m tools.metric_docs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from adapter_store.metrics.definitions import SECTIONS as STORE_SECTIONS
from inference_svc.metrics.definitions import SECTIONS as INFERENCE_SECTIONS
from servicekit.telemetry.metrics import Definition

PATH = Path(__file__).parent.parent / "docs" / "observability" / "metrics.md"

INTRODUCTION = """# Metrics

Both services serve Prometheus' text format over HTTP at `--metrics-listen`, without a token.
`make docs` generates this page from the definitions in the code; a test checks that nothing else
is exported.

A histogram has the series `_bucket`, `_sum` and `_count`, a summary `_sum` and `_count`. Counters
start at 0 with their process.

A scrape has fewer than 5,500 series however many adapters there are. In series by `adapter` the
busiest `--metrics-adapters` have one each, as `tenant/name`; requests to the base model count as
`base`, all others as `other`. When another adapter has become clearly busier, one of them loses
its series, and its counts go to `former`, so that sums over all series never fall. Take rates
without it:

```promql
topk(10, rate(loadout_inference_adapter_generated_tokens_total{adapter!="former"}[5m]))
```

An adapter that gets its series back starts at 0, as after a restart, which `rate` allows for.

Two families for gateways name the adapters themselves: `vllm:lora_adapter_loaded` and
`vllm:lora_requests_info`. A scrape has a bounded number of them, but each adapter that is loaded,
and each new set of adapters with requests, begins a series that Prometheus stores for its whole
retention time. Routers scrape the servers themselves, so drop both families where Prometheus
scrapes (`metric_relabel_configs`, action `drop`), as `deploy/` does. Alerts use
`loadout_inference_residency_series` and `loadout_inference_snapshot_age_seconds` instead.

Each scrape asks the engine for its numbers. If it does not answer within two seconds, the last
ones are shown, and `loadout_inference_snapshot_age_seconds` grows.
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
