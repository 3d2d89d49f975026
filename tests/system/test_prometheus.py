"""Both services as real processes under a mixed load, scraped by a real Prometheus with our rules:
whatever a dashboard or a rule asks for is there, and whatever is there is documented."""

from __future__ import annotations

import math
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from adapter_store.metrics import definitions as store
from inference_svc.metrics import definitions as inference
from tests.support import forks
from tests.support.deploy.manifests import ROOT
from tests.support.deploy.rules import matchers, metric, rules, selectors
from tests.system.dashboards import FOLDER, Dashboard
from tools.mixed_load.load import MixedLoad
from tools.packaging.prometheus_package import programs
from tools.pages.metric_docs import PATH as PAGE
from tools.prometheus import Job, Prometheus, Series
from tools.prometheus_rule import rule_files

RUN_S = 2.0
"""After everything has happened once."""
PAUSE_S = 0.25
"""Between the calls of each caller: once each has done everything, it need not do much."""
INTERVAL_S = 2.0
"""The time that an engine may take to answer: a scrape that takes longer ends all series."""
PATIENCE_S = 30.0
"""How long a question is repeated: on a busy machine a scrape is missed."""
MIN_DASHBOARDS = 3
ALERTS, RECORDS = rules("alert"), rules("record")
PROVOKED = {"LoadoutDigestMismatch", "LoadoutThrash", "LoadoutKvPagesExhausted"}
"""Alerts that the load causes: a trainer expects another digest, and memory is short."""
TIMED = {"LoadoutColdLoadsSlow", "LoadoutQueueGrows"}
"""Alerts about slowness, which a busy machine may cause."""
ITS_OWN = re.compile(r"(scrape|ALERTS)(_\w+)?|up|(instance|instance_tier):\w+:\w+")
"""Names of series that Prometheus adds."""
GATEWAYS_NAME = re.compile(r"vllm:\w+ metric names should not contain ':'")
CLUSTERS = ("east", "west")
ELSEWHERE = {"adapter-store": "stores", "inference": "gpus"}
"""What the jobs are called where there are neither clusters nor namespaces."""
DOCUMENTED = frozenset(re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE))
KINDS_OF_SOME = ("recurrent", "rank", "registered")
OF_SOME_SERVERS = {
    *(
        name
        for name in DOCUMENTED
        if name.startswith(tuple(f"loadout_inference_{kind}_" for kind in KINDS_OF_SOME))
    ),
    "loadout_inference_weight_format_info",
    "loadout_inference_prompt_image_fetches_total",
}
"""Exported for models with recurrent layers alone, for those with weights in few bits, for servers
of several ranks, that fetch images, and on GPUs: test_recurrent_states, test_few_bits, test_ranks,
test_registration."""
DROPPED = {"vllm:lora_adapter_loaded", "vllm:lora_requests_info"}


@dataclass(frozen=True)
class Watched:
    load: MixedLoad
    prometheus: Prometheus

    def gives_data(self, promql: str) -> bool:
        """Returns whether a query has a value that is a number."""
        return any(map(_has_number, self.prometheus.query(promql)))

    def missing(self, asked: Mapping[str, Callable[[], bool]]) -> list[str]:
        """Returns the names of the questions whose answer stayed no while the load went on."""
        deadline_s = time.monotonic() + PATIENCE_S
        while left := {name: ask for name, ask in asked.items() if not ask()}:
            if time.monotonic() > deadline_s:
                break
            asked = left
            self.load.run(INTERVAL_S / 2)
        return list(left)

    def without_data(self, promqls: Mapping[str, str]) -> list[str]:
        """Returns the names of the queries that give no data."""
        asked = {name: partial(self.gives_data, promql) for name, promql in promqls.items()}
        return self.missing(asked)

    def tells_replicas_apart(self, promql: str) -> bool:
        """Returns whether a query has series of each cluster, and of none: all share addresses."""
        found = {series.labels.get("cluster", "") for series in self.prometheus.query(promql)}
        return found == {"", *CLUSTERS}


def _asks_some_servers(promql: str) -> bool:
    names = {metric(selector) for selector in selectors(promql)}
    return bool(OF_SOME_SERVERS & names) or 'place=~"prompt_image' in promql  # test_picture_calls


def _has_number(series: Series) -> bool:
    return not math.isnan(series.value)


def _jobs(load: MixedLoad) -> list[Job]:
    """Returns jobs that scrape both services as two clusters would, and as somebody would who has
    no labels and other names for jobs; with the relabelling of compose."""
    shipped = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yml").read_text())
    relabel = {
        each["job_name"]: each.get("metric_relabel_configs", ())
        for each in shipped["scrape_configs"]
    }
    found = []
    for job in load.jobs:
        mended = replace(job, metric_relabel=relabel[job.name])
        found.append(replace(mended, name=ELSEWHERE[job.name]))
        for cluster in CLUSTERS:
            found.append(replace(mended, labels={"cluster": cluster, "namespace": "loadout"}))
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("watched")
    with forks.forked_system(), MixedLoad(folder / "load", caller_pause_s=PAUSE_S) as load:
        prometheus = Prometheus(
            folder / "prometheus", _jobs(load), interval_s=INTERVAL_S, rule_files=rule_files()
        )
        with prometheus:
            prometheus.wait_up()
            load.wait_toured()
            load.run(RUN_S)
            yield Watched(load, prometheus)
            load.check()


@pytest.fixture(scope="module")
def dashboards(watched: Watched) -> list[Dashboard]:
    found = [Dashboard(path, watched.prometheus) for path in sorted(FOLDER.glob("*.json"))]
    assert len(found) >= MIN_DASHBOARDS, f"no dashboards in {FOLDER}"
    return found


def test_all_are_scraped(watched: Watched) -> None:
    found = [each["labels"] for each in watched.prometheus.targets()]
    assert {(each["job"], each.get("cluster", "")) for each in found} == {
        *((name, cluster) for name in ELSEWHERE for cluster in CLUSTERS),
        *((name, "") for name in ELSEWHERE.values()),
    }


def test_every_variable_of_every_dashboard_has_values(dashboards: list[Dashboard]) -> None:
    """Dashboards find jobs whatever they are called."""
    for dashboard in dashboards:
        assert [name for name, found in dashboard.choices.items() if not found] == []
        assert dashboard.choices["cluster"] == list(CLUSTERS)
        for service, name in (("store", "adapter-store"), ("inference", "inference")):
            found = dashboard.choices.get(f"{service}_job")
            assert found in (None, sorted([name, ELSEWHERE[name]]))


def test_every_query_of_every_panel_gives_data(
    watched: Watched, dashboards: list[Dashboard]
) -> None:
    """The data is there without the zero that is shown for what has not happened."""
    queries = [
        query
        for each in dashboards
        for query in each.queries()
        if not _asks_some_servers(query.promql)
    ]
    assert len(queries) > 100
    assert sum(query.bare != query.promql for query in queries) == 5
    assert watched.without_data({query.where: query.bare for query in queries}) == []


def test_queries_by_replica_tell_the_same_address_in_two_clusters_apart(
    watched: Watched, dashboards: list[Dashboard]
) -> None:
    asked = {
        query.where: partial(watched.tells_replicas_apart, query.bare)
        for dashboard in dashboards
        for query in dashboard.queries()
        if query.is_by_replica and not _asks_some_servers(query.promql)
    }
    assert len(asked) > 30
    assert watched.missing(asked) == []


def test_no_target_is_not_shown_as_zero(watched: Watched, dashboards: list[Dashboard]) -> None:
    queries = [each for board in dashboards for each in board.queries_that_tell_of_nothing()]
    assert len(queries) == 4
    for query in queries:
        assert watched.prometheus.query(query.without_jobs) == [], query.where


def test_every_metric_of_a_dashboard_exists(watched: Watched, dashboards: list[Dashboard]) -> None:
    exported = names(watched) | OF_SOME_SERVERS
    for dashboard in dashboards:
        for query in dashboard.queries():
            used = {metric(selector) for selector in selectors(query.promql)}
            assert used <= exported, f"{query.where}: {used - exported}"


def test_every_recording_rule_gives_data(watched: Watched) -> None:
    assert watched.without_data({name: name for name in RECORDS}) == []


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_asks_for_what_there_is(watched: Watched, name: str) -> None:
    """Every series that it names exists and has the labels of its matchers. Their values are left
    out: they stand for what should not happen, and the tests of the rules know them."""
    watched.prometheus.query(ALERTS[name]["expr"])
    wanted = {}
    for selector in selectors(ALERTS[name]["expr"]):
        if metric(selector) in OF_SOME_SERVERS:
            continue
        labelled = ",".join(f'{label}!=""' for label, _, _ in matchers(selector))
        wanted[selector] = f"{metric(selector)}{{{labelled}}}"
    assert watched.without_data(wanted) == []


def test_rules_are_evaluated_without_errors(watched: Watched) -> None:
    found = watched.prometheus.rules()
    assert {rule["name"] for rule in found} == ALERTS.keys() | RECORDS.keys()
    assert [rule for rule in found if rule["health"] != "ok"] == []


def test_alerts_are_about_what_the_load_does_and_nothing_else(watched: Watched) -> None:
    """Where a scrape was missed, down alerts wait until the next one."""
    everywhere = partial(_fire_everywhere, watched.prometheus)
    nothing_else = partial(_wait_for_nothing_else, watched.prometheus)
    asked = {"fire everywhere": everywhere, "nothing else waits": nothing_else}
    assert watched.missing(asked) == [], watched.prometheus.alerts()
    assert {name for name, _ in _alerts(watched.prometheus, "firing")} == {"LoadoutDigestMismatch"}


def _fire_everywhere(prometheus: Prometheus) -> bool:
    """Returns whether alerts fire in each cluster, and where there is none."""
    return {cluster for _, cluster in _alerts(prometheus, "firing")} == {"", *CLUSTERS}


def _wait_for_nothing_else(prometheus: Prometheus) -> bool:
    return {name for name, _ in _alerts(prometheus, "pending")} - TIMED <= PROVOKED


def _alerts(prometheus: Prometheus, state: str) -> set[tuple[str, str]]:
    """Returns the names and clusters of the alerts in a state."""
    labels = [each["labels"] for each in prometheus.alerts() if each["state"] == state]
    return {(each["alertname"], each.get("cluster", "")) for each in labels}


def test_what_is_exported_is_documented_and_the_reverse(watched: Watched) -> None:
    found = {_family(name) for name in names(watched) if not ITS_OWN.fullmatch(name)}
    assert not found & OF_SOME_SERVERS
    assert found | OF_SOME_SERVERS == DOCUMENTED - DROPPED
    assert (
        set(re.findall(r"^([\w:]+)\{", exposition(watched, "inference"), re.MULTILINE)) >= DROPPED
    )


def test_promtool_finds_nothing_but_the_names_that_gateways_chose(watched: Watched) -> None:
    for job in watched.load.jobs:
        command = [str(programs().promtool), "check", "metrics"]
        text = exposition(watched, job.name).encode()
        done = subprocess.run(command, input=text, capture_output=True, check=False)
        said = (done.stdout + done.stderr).decode()
        assert all(GATEWAYS_NAME.fullmatch(line) for line in said.splitlines() if line), said


def exposition(watched: Watched, name: str) -> str:
    """Returns what a job's target exports: Prometheus and routers read it."""
    [[address]] = [job.addresses for job in watched.load.jobs if job.name == name]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())


def names(watched: Watched) -> set[str]:
    """Returns the names of all series."""
    return set(watched.prometheus.label_values("__name__"))


def _family(name: str) -> str:
    """Returns a series' name without the suffix that a histogram or summary gives it."""
    for definition in (*inference.DEFINITIONS.values(), *store.DEFINITIONS.values()):
        if definition.kind.value in ("histogram", "summary"):
            suffix = name.removeprefix(definition.name)
            if suffix in ("_bucket", "_sum", "_count"):
                return definition.name
    return name
