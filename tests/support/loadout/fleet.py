"""Several replicas of the inference service, and a client of them."""

from __future__ import annotations

from dataclasses import dataclass

from loadout import Client
from loadout.prometheus import scrape


@dataclass(frozen=True)
class Replica:
    url: str
    grpc: str
    metrics: str

    @property
    def num_requests(self) -> float:
        return scrape(self.metrics).sum("loadout_inference_requests_total")


@dataclass(frozen=True)
class Fleet:
    replicas: list[Replica]
    client: Client

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]
