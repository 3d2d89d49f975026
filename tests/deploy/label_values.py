"""What labels of our metrics can be, from the code that sets them."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from types import ModuleType

import grpc
from prometheus_client.utils import floatToGoString

import adapter_store.errors
import inference_svc.errors
from adapter_store.metrics.registry import Metrics as StoreMetrics
from inference_svc import server
from inference_svc.adapters.load_metrics import LoadSource
from inference_svc.api import pictures
from inference_svc.api.http import app
from inference_svc.api.http.errors import CLIENT_CLOSED_REQUEST, ERROR_STATUSES
from inference_svc.errors import DeviceFault
from inference_svc.metrics.gateway_routing import LEVELS
from inference_svc.metrics.top_adapters import BASE, FORMER, OTHER
from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.inference.v1 import inference_pb2
from servicekit.telemetry.histogram import IDLE_BOUNDS_S
from tests.support.deploy.rules import rules
from tests.support.error_kinds import GENERAL, kinds_of

Known = dict[str, set[str]]
"""By label."""


def known(metric: str) -> Known:
    """Returns the known values of the labels of ours, of a recorded series, or of ALERTS."""
    if metric == "ALERTS":
        return {"alertname": set(rules("alert")), "alertstate": {"pending", "firing"}}
    return _store(metric) if "loadout_store_" in metric else _inference()


def _store(metric: str) -> Known:
    [service] = adapter_store_pb2.DESCRIPTOR.services_by_name.values()
    return {
        "code": _codes(),
        "method": {method.name for method in service.methods},
        "reason": _reasons(adapter_store.errors),
        "result": {
            sample.labels["result"]
            for family in StoreMetrics().registry.collect()
            for sample in family.samples
            if sample.name == metric and "result" in sample.labels
        },
    }


def _inference() -> Known:
    [service] = inference_pb2.DESCRIPTOR.services_by_name.values()
    routes = {*re.findall(r'Route\("([^"]+)"', inspect.getsource(app)), *app.POOLING}
    return {
        "adapter": {BASE, FORMER, OTHER},
        "code": _codes(),
        "kind": _values(DeviceFault),
        "le": {floatToGoString(bound) for bound in IDLE_BOUNDS_S},
        "level": set(LEVELS.values()),
        "method": {method.name for method in service.methods} | routes,
        "place": {name for module in (server, pictures) for name in _places(module)},
        "reason": _reasons(inference_svc.errors),
        "route": routes,
        "source": _values(LoadSource),
        "status": {str(answer.status) for answer in ERROR_STATUSES.values()}
        | {"200", str(CLIENT_CLOSED_REQUEST)},
        "tier": set(LEVELS),
    }


def _places(module: ModuleType) -> list[str]:
    """Returns the names of resources that a module shares out."""
    pattern = r'(?:Shares\(|Uploads\(|FairExecutor\(\w+, )"(\w+)"'
    return re.findall(pattern, inspect.getsource(module))


def _codes() -> set[str]:
    return {code.name for code in grpc.StatusCode}


def _values(kind: type[Enum]) -> set[str]:
    return {each.value for each in kind}


def _reasons(errors: ModuleType) -> set[str]:
    return {kind.reason for kind in (*GENERAL, *kinds_of(errors))}
