"""What has happened between two scrapes of the inference service."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal

from loadout.prometheus import Metrics, quantile

PREFIX = "loadout_inference_"
MERGED = ("former", "other")
"""Series that stand for many adapters."""


@dataclass(frozen=True, slots=True)
class Rates:
    """`seconds` lie between them. A counter that fell began anew: then nothing is known."""

    now: Metrics
    before: Metrics
    seconds: float

    def rate(self, name: str, **labels: str) -> float:
        """Per second."""
        now = self.now.sum(f"{PREFIX}{name}", **labels)
        grown = now - self.before.sum(f"{PREFIX}{name}", **labels)
        return max(0.0, grown) / self.seconds if self.seconds > 0 else 0.0

    def lines(self) -> list[str]:
        """For people."""
        tokens = self.rate("sampled_tokens_total")
        lines = [
            f"rates     {self.rate('requests_total'):.1f} requests/s, {tokens:.1f} tokens/s, "
            f"{self.rate('prompt_tokens_total'):.1f} prompt tokens/s, "
            f"{self.rate('rejections_total'):.1f} refused/s",
            f"pulls     {self.rate('pulls_total'):.1f}/s, "
            f"{decimal(int(self.rate('pulled_bytes_total')))}/s, "
            f"{self.rate('pull_failures_total'):.1f} failed/s",
        ]
        shown = [
            f"{label} {' / '.join(values)}"
            for label, name in (
                ("first token", "first_token_seconds"),
                ("inter-token", "inter_token_seconds"),
                ("adapter wait", "adapter_wait_seconds"),
            )
            if (values := self._quantiles(f"{PREFIX}{name}"))
        ]
        return [*lines, f"p50 / p99 {', '.join(shown)}"] if shown else lines

    def busiest(self, count: int) -> list[tuple[str, float, float]]:
        """(adapter, requests/s, tokens/s) of those that had any, the most tokens first."""
        name = "adapter_generated_tokens_total"
        found = []
        for sample in self.now.select(f"{PREFIX}{name}"):
            adapter = sample.labels.get("adapter", "")
            tokens = self.rate(name, adapter=adapter)
            requests = self.rate("adapter_requests_total", adapter=adapter)
            if requests and adapter not in MERGED:
                found.append((adapter, requests, tokens))
        return sorted(found, key=lambda each: -each[2])[:count]

    def _quantiles(self, name: str) -> list[str]:
        found = [quantile(share, self.now, self.before, name) for share in (0.5, 0.99)]
        return [f"{value * 1000:.1f} ms" for value in found if value is not None]
