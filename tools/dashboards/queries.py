"""Writes PromQL over the metrics of one service, limited by the dashboards' variables."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "$__rate_interval"
"""Grafana's window, at least four scrapes long."""
REPLICA = "cluster, namespace, instance"
"""The labels of one replica, because pods of other clusters and namespaces may have its address."""
WHICH = "{{instance}} {{namespace}} {{cluster}}"
"""The legend of a replica; labels that are absent leave nothing."""
SAME_TARGET = "on (cluster, namespace, job, instance)"
CATALOG = "cluster, namespace"
"""The labels that all replicas of one catalog share."""


WHERE = 'cluster=~"$cluster",namespace=~"$namespace"'


@dataclass(frozen=True, slots=True)
class Service:
    """The queries of one service.

    `name` is the word in its metrics and the start of its variables, `<name>_job` and
    `<name>_instance`. Methods take metrics without their prefix, except metrics of the process and
    recording rules. `where` adds matchers of labels, and `by` has the labels to keep. A process
    exports `presence` from its first moment on, which identifies our jobs under any name.
    """

    name: str
    presence: str

    @property
    def targets(self) -> str:
        """Returns the matchers of the service's targets, which `up` also has."""
        return f'{WHERE},job=~"${self.name}_job"'

    @property
    def up(self) -> str:
        """Returns 1 for each target that answers, and 0 for each other one."""
        return f"up{{{self.targets}}}"

    @property
    def down(self) -> str:
        """Counts targets that do not answer; without targets the answer is empty, and not zero."""
        return f"count({self.up} == 0) or 0 * count({self.up})"

    def series(self, metric: str, where: str = "") -> str:
        """Returns the metric's series of the chosen instances."""
        matchers = [self.targets, f'instance=~"${self.name}_instance"', *([where] if where else [])]
        is_whole = ":" in metric or metric.startswith("process_")
        prefix = "" if is_whole else f"loadout_{self.name}_"
        return f"{prefix}{metric}{{{','.join(matchers)}}}"

    def sum(self, metric: str, by: str = "", where: str = "") -> str:
        """Returns the sum of a gauge."""
        return f"{_over('sum', by)}({self.series(metric, where)})"

    def rate(self, metric: str, by: str = "", where: str = "", window: str = WINDOW) -> str:
        """Returns the sum of a counter's growth per second."""
        return f"{_over('sum', by)}(rate({self.series(metric, where)}[{window}]))"

    def growth(self, metric: str, by: str = "", where: str = "", window: str = WINDOW) -> str:
        """Returns the sum of a counter's growth."""
        return f"{_over('sum', by)}(increase({self.series(metric, where)}[{window}]))"

    def or_zero(self, expression: str) -> str:
        """Returns zero for events whose series begin with the first one, if there are targets."""
        return f"{expression} or on () 0 * count({self.up})"

    def buckets(self, metric: str, window: str = WINDOW) -> str:
        """Returns a histogram's growth by bucket, for a heatmap."""
        return self.growth(f"{metric}_bucket", "le", window=window)

    def quantile(self, share: float, metric: str, by: str = "", where: str = "") -> str:
        """Returns the quantile `share` of a histogram."""
        labels = f"le, {by}" if by else "le"
        return f"histogram_quantile({share}, {self.rate(f'{metric}_bucket', labels, where)})"

    def mean(self, metric: str, by: str = "", where: str = "", window: str = WINDOW) -> str:
        """Returns the mean of a histogram's or a summary's observations."""
        total = self.rate(f"{metric}_sum", by, where, window)
        return f"{total} / {self.rate(f'{metric}_count', by, where, window)}"


INFERENCE = Service("inference", presence="loadout_inference_generated_tokens_total")
STORE = Service("store", presence="loadout_store_build_info")


def share(part: str, *others: str) -> str:
    """Returns the share of `part` in the sum of all, 0 to 1; the answer is empty without data."""
    whole = " + ".join([part, *others])
    return f"{part} / ({whole})"


def _over(operator: str, by: str) -> str:
    return f"{operator} by ({by}) " if by else operator
