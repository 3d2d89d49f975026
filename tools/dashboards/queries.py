"""PromQL over the metrics of one service, narrowed by the dashboards' variables."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "$__rate_interval"
"""Grafana's: at least four scrapes long."""
REPLICA = "cluster, namespace, instance"
"""The labels of one replica: pods of other clusters and namespaces may have the same address."""
WHICH = "{{instance}} {{namespace}} {{cluster}}"
"""The legend of a replica; labels that are absent leave nothing."""
SAME_TARGET = "on (cluster, namespace, job, instance)"
CATALOG = "cluster, namespace"
"""The labels of what shares one catalog."""


WHERE = 'cluster=~"$cluster",namespace=~"$namespace"'


@dataclass(frozen=True, slots=True)
class Service:
    """`name` is the word in its metrics and the start of its variables, `<name>_job` and
    `<name>_instance`. Metrics are given without their prefix; whole are those of the process and
    what rules record. `where` is more matchers of labels, `by` the labels that are kept.
    `presence` is exported from a process's first moment on: whatever the jobs are called, those
    that have it are ours.
    """

    name: str
    presence: str

    @property
    def targets(self) -> str:
        """Returns the matchers of the service's targets, which `up` also has."""
        return f'{WHERE},job=~"${self.name}_job"'

    @property
    def up(self) -> str:
        """1 for each target that answers, 0 for each that does not."""
        return f"up{{{self.targets}}}"

    @property
    def down(self) -> str:
        """Counts targets that do not answer; without targets it is nothing, which is not zero."""
        return f"count({self.up} == 0) or 0 * count({self.up})"

    def series(self, metric: str, where: str = "") -> str:
        """The metric's series of the chosen instances."""
        matchers = [self.targets, f'instance=~"${self.name}_instance"', *([where] if where else [])]
        is_whole = ":" in metric or metric.startswith("process_")
        prefix = "" if is_whole else f"loadout_{self.name}_"
        return f"{prefix}{metric}{{{','.join(matchers)}}}"

    def sum(self, metric: str, by: str = "", where: str = "") -> str:
        """A gauge, added up."""
        return f"{_over('sum', by)}({self.series(metric, where)})"

    def rate(self, metric: str, by: str = "", where: str = "", window: str = WINDOW) -> str:
        """A counter's growth per second, added up."""
        return f"{_over('sum', by)}(rate({self.series(metric, where)}[{window}]))"

    def growth(self, metric: str, by: str = "", where: str = "", window: str = WINDOW) -> str:
        """Returns the sum of a counter's growth."""
        return f"{_over('sum', by)}(increase({self.series(metric, where)}[{window}]))"

    def or_zero(self, expression: str) -> str:
        """Returns zero for events whose series begin with the first one, if there are targets."""
        return f"{expression} or on () 0 * count({self.up})"

    def buckets(self, metric: str, window: str = WINDOW) -> str:
        """A histogram's growth by bucket: what a heatmap draws."""
        return self.growth(f"{metric}_bucket", "le", window=window)

    def quantile(self, share: float, metric: str, by: str = "", where: str = "") -> str:
        """Returns the value below which `share` of a histogram's observations are."""
        labels = f"le, {by}" if by else "le"
        return f"histogram_quantile({share}, {self.rate(f'{metric}_bucket', labels, where)})"

    def mean(self, metric: str, by: str = "", where: str = "", window: str = WINDOW) -> str:
        """Returns the mean of a histogram's or a summary's observations."""
        total = self.rate(f"{metric}_sum", by, where, window)
        return f"{total} / {self.rate(f'{metric}_count', by, where, window)}"


INFERENCE = Service("inference", presence="loadout_inference_generated_tokens_total")
STORE = Service("store", presence="loadout_store_build_info")


def share(part: str, *others: str) -> str:
    """`part` of the sum of itself and all others, 0 to 1; of nothing, nothing."""
    whole = " + ".join([part, *others])
    return f"{part} / ({whole})"


def _over(operator: str, by: str) -> str:
    return f"{operator} by ({by}) " if by else operator
