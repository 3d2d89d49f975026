"""Writes docs/metrics.md from the definitions of the services' metrics.

python -m tools.metric_docs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from adapter_store import metric_definitions as store
from inference_svc import metric_definitions as inference

PATH = Path(__file__).parent.parent / "docs" / "metrics.md"

INTRODUCTION = """# Metrics

Both services serve Prometheus' text format over HTTP at `--metrics-listen`, without a token. This
page is made of the definitions in the code by `make docs`; a test sees to it that nothing else is
exported.

A histogram has the series `_bucket`, `_sum` and `_count`, a summary `_sum` and `_count`. Counters
start at 0 with their process.

However many adapters there are, a server has fewer than 5,000 series. In series by `adapter` the
busiest `--metrics-adapters` have one each, as `tenant/name`; requests to the base model count as
`base`, all others as `other`. When another adapter has become clearly busier, one of them loses its
series. What it had counted goes to `former`, so that sums over all series never fall; take rates
without it:

```promql
topk(10, rate(loadout_inference_adapter_generated_tokens_total{adapter!="former"}[5m]))
```

An adapter that gets its series back starts at 0 again, as after a restart, which `rate` allows for.
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
