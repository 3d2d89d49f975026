"""Links from one dashboard to another, and from a point in a panel to its subject."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

FLEET, ADAPTERS, STORE = "loadout-fleet", "loadout-adapters", "loadout-store"
"""The dashboards' uids, which are addresses that people bookmark."""

TITLES = {
    FLEET: "Loadout: fleet overview",
    ADAPTERS: "Loadout: adapters and caches",
    STORE: "Loadout: adapter store",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a dashboard, with the same time, clusters and namespaces.

    It sets `variables` there to values of the clicked point: a label such as
    `${__field.labels.instance}`, or in a table a column such as `${__data.fields.adapter}`.
    """

    title: str
    uid: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def builder(self) -> DashboardLink:
        parts = ["${__url_time_range}", "${datasource:queryparam}"]
        parts += ["${cluster:queryparam}", "${namespace:queryparam}"]
        parts += [f"var-{name}={value}" for name, value in self.variables.items()]
        return DashboardLink(self.title).url(f"/d/{self.uid}?{'&'.join(parts)}")


TO_REPLICA = Link(
    "Adapters of this replica", ADAPTERS, {"inference_instance": "${__field.labels.instance}"}
)
TO_ADAPTER = Link("Only this adapter", ADAPTERS, {"adapter": "${__field.labels.adapter}"})
TO_CACHES = Link("Adapters and caches", ADAPTERS)
TO_LOADS = Link("Loads at that time", ADAPTERS)
TO_STORE = Link("The store at that time", STORE)


def to_others(own: str) -> list[DashboardLink]:
    """Returns the links at the top of the dashboard `own`, which keep the chosen values."""
    return [
        DashboardLink(title)
        .type(DashboardLinkType.LINK)
        .url(f"/d/{uid}")
        .icon("dashboard")
        .tooltip(f"The same time in {title}")
        .include_vars(True)
        .keep_time(True)
        for uid, title in TITLES.items()
        if uid != own
    ]
