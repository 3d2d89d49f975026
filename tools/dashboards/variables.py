"""What a reader chooses at the top of a dashboard.

A variable means the same on each dashboard that has it, so that links can hand it on.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from tools.dashboards.queries import INFERENCE, STORE, Service

Variable = Builder[models.VariableModel]

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
ANY = ".*"
"""Also no such label at all, as with a plain static scrape that knows no namespaces."""
NOT_ADAPTERS = "former"
"""What adapters had counted that lost their series: of the past, and no adapter."""

_ASKED_BY_EDITOR = {"qryType": 1, "refId": "PrometheusVariableQueryEditor-VariableQuery"}
"""So that Grafana's editor shows it as values of a label."""
_ABOUT = '{__name__=~"loadout_(inference|store)_build_info"}'


def datasource() -> Variable:
    return builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def namespace() -> Variable:
    """Of Kubernetes."""
    return _values("namespace", "Namespace", _ABOUT, "namespace").all_value(ANY)


def job(service: Service) -> Variable:
    """The service's scrape jobs. All are those that there are, as other things have jobs, too."""
    series = f'loadout_{service.name}_build_info{{namespace=~"$namespace"}}'
    return _values(f"{service.name}_job", f"{_TITLES[service]} job", series, "job")


def instance(service: Service) -> Variable:
    """The service's replicas."""
    series = f"loadout_{service.name}_build_info{{{service.targets}}}"
    name, label = f"{service.name}_instance", f"{_TITLES[service]} replica"
    return _values(name, label, series, "instance").all_value(ANY)


def adapter() -> Variable:
    """Those that have a series of their own, the base model, and all others as one."""
    series = INFERENCE.series("adapter_requests_total")
    variable = _values("adapter", "Adapter", series, "adapter").all_value(ANY)
    return variable.regex(f"/^(?!{NOT_ADAPTERS}$).+/")


_TITLES = {INFERENCE: "Inference", STORE: "Store"}


def _values(name: str, label: str, series: str, of_label: str) -> builders.QueryVariable:
    query = f"label_values({series}, {of_label})"
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    variable = builders.QueryVariable(name).label(label).datasource(DATASOURCE)
    variable.query({**_ASKED_BY_EDITOR, "query": query}).definition(query)
    variable.multi(True).include_all(True).current(everything)
    variable.sort(models.VariableSort.NATURAL_ASC)
    return variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
