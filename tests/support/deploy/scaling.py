"""The metrics that autoscalers watch."""

from __future__ import annotations

import re

from tests.support.deploy.manifests import Object

METRIC = re.compile(r"\b(?:loadout_(?:store|inference)_|vllm:)\w+")
WOKEN_BY = "envoy_http_downstream_rq_total"
"""A real Envoy exports it: tests/system/test_routing.py."""


def targets(autoscaler: Object) -> dict[str, int]:
    """Metric -> how much of it a replica is to have."""
    if autoscaler["kind"] == "ScaledObject":
        pairs = [
            (METRIC.findall(trigger["metadata"]["query"]), trigger["metadata"]["threshold"])
            for trigger in autoscaler["spec"]["triggers"]
        ]
    else:
        pods = [metric["pods"] for metric in autoscaler["spec"]["metrics"]]
        pairs = [([each["metric"]["name"]], each["target"]["averageValue"]) for each in pods]
    return {metric: int(value) for [metric], value in pairs}
