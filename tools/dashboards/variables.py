"""The choices at the top of a dashboard.

A variable has the same meaning on each dashboard, so that links can pass it on.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from tools.dashboards.queries import INFERENCE, STORE, WHERE, Service

Variable = Builder[models.VariableModel]

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
ANY = ".*"
"""Also matches an absent label, because a plain static scrape has no namespaces."""
NOT_ADAPTERS = "former"
"""Label of the counts of adapters that lost their series; no adapter has it."""

MEMORY = "7d"
"""Silent jobs count as down for this long, even if the chosen time has no data of them; then they
are forgotten."""

_REF_ID = "PrometheusVariableQueryEditor-VariableQuery"
_LABEL_VALUES, _QUERY_RESULT = 1, 3
"""Kinds of queries, for Grafana's editor."""


def datasource() -> Variable:
    return builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def cluster() -> Variable:
    """Selects clusters, if one Prometheus, or a proxy for several, has data of many."""
    return _values("cluster", "Cluster", _present(), "cluster").all_value(ANY)


def namespace() -> Variable:
    """Selects Kubernetes namespaces."""
    series = _present('cluster=~"$cluster"')
    return _values("namespace", "Namespace", series, "namespace").all_value(ANY)


def job(service: Service) -> Variable:
    """Selects the service's scrape jobs, under any name. All means the service's existing jobs,
    because other programs have jobs too."""
    present = f"last_over_time({service.presence}{{{WHERE}}}[{MEMORY}])"
    query = f"query_result(group by (job) ({present}))"
    variable = _choice(f"{service.name}_job", f"{_TITLES[service]} job", query, _QUERY_RESULT)
    return variable.regex('/job="([^"]+)"/')


def instance(service: Service) -> Variable:
    """Selects the service's replicas."""
    series = f"{service.presence}{{{service.targets}}}"
    name, label = f"{service.name}_instance", f"{_TITLES[service]} replica"
    return _values(name, label, series, "instance").all_value(ANY)


def adapter() -> Variable:
    """Selects adapters with their own series, the base model, and all others as one."""
    series = INFERENCE.series("adapter_requests_total")
    variable = _values("adapter", "Adapter", series, "adapter").all_value(ANY)
    return variable.regex(f"/^(?!{NOT_ADAPTERS}$).+/")


_TITLES = {INFERENCE: "Inference", STORE: "Store"}


def _present(where: str = "") -> str:
    """Returns the series of all our services."""
    matchers = [f'__name__=~"{INFERENCE.presence}|{STORE.presence}"', *([where] if where else [])]
    return f"{{{','.join(matchers)}}}"


def _values(name: str, label: str, series: str, of_label: str) -> builders.QueryVariable:
    """Selects values of a label within the chosen time."""
    return _choice(name, label, f"label_values({series}, {of_label})", _LABEL_VALUES)


def _choice(name: str, label: str, query: str, kind: int) -> builders.QueryVariable:
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    variable = builders.QueryVariable(name).label(label).datasource(DATASOURCE)
    variable.query({"qryType": kind, "refId": _REF_ID, "query": query}).definition(query)
    variable.multi(True).include_all(True).current(everything)
    variable.sort(models.VariableSort.NATURAL_ASC)
    return variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
