"""Recording and alert rules: valid, tested with promtool's own tests, explained, and the same
everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from adapter_store.metrics.definitions import SECTIONS as STORE_SECTIONS
from inference_svc.metrics.definitions import SECTIONS as INFERENCE_SECTIONS
from tests.support.deploy.manifests import ROOT, overlay
from tests.support.deploy.rules import (
    UNIT_TESTS,
    Rule,
    groups,
    metric,
    promtool,
    rules,
    selectors,
    unit_tests,
)
from tools import prometheus_rule

ALERTS, RECORDS = rules("alert"), rules("record")
COMPOSE = ROOT / "deploy" / "compose"
MOUNTED = "/etc/prometheus/rules"
GRAFANA = ROOT / "deploy" / "grafana" / "dashboards"
RUNBOOK = (ROOT / "docs" / "operations" / "runbook.md").read_text()
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


@pytest.mark.processes
def test_promtool_finds_the_rules_valid():
    promtool("check", "rules", "--lint-fatal", *prometheus_rule.rule_files())


@pytest.mark.processes
def test_promtool_tests_them():
    promtool("test", "rules", *UNIT_TESTS)


def test_groups_have_names_of_their_own():
    """In one object of the operator they must; and in the unit tests what is recorded comes first,
    or alerts would see it a minute later, or not, as it happens."""
    names = [group["name"] for group in groups()]
    assert len(set(names)) == len(names)
    for path in UNIT_TESTS:
        order = yaml.safe_load(path.read_text())["group_eval_order"]
        assert sorted(order) == sorted(names)
        assert order == sorted(order, key=lambda name: not name.startswith("loadout-recording-"))


@pytest.mark.processes
def test_compose_loads_them(tmp_path):
    """The configuration of Prometheus is valid with our folder where compose mounts it."""
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    mounts = [each.split(":") for each in compose["services"]["prometheus"]["volumes"]]
    [source] = [source for source, target, *_ in mounts if target == MOUNTED]
    assert (COMPOSE / source).resolve() == prometheus_rule.RULES
    text = (COMPOSE / "prometheus.yml").read_text()
    [pattern] = yaml.safe_load(text)["rule_files"]
    here = pattern.replace(MOUNTED, str(prometheus_rule.RULES))
    assert sorted(Path("/").glob(here.lstrip("/"))) == prometheus_rule.rule_files()
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace(pattern, here))
    promtool("check", "config", config)


@pytest.mark.processes
def test_the_operator_gets_the_same_rules():
    assert prometheus_rule.PATH.read_text() == prometheus_rule.render(), "run `make docs`"
    [thing] = overlay("production").of_kind("PrometheusRule")
    there = [rule for group in thing["spec"]["groups"] for rule in group["rules"]]
    by_name = {rule.get("alert") or rule["record"]: rule for rule in there}
    assert by_name == {**ALERTS, **RECORDS}
    assert len(there) == len(by_name)


@pytest.mark.processes
def test_every_scrape_drops_the_names_of_adapters():
    """They come and go without end. Routers read them from the services themselves."""
    [regex] = {rule["regex"] for rule in dropped_by_compose()}
    assert {name for name in known_metrics() if re.fullmatch(regex, name)} == {
        "vllm:lora_adapter_loaded",
        "vllm:lora_requests_info",
    }
    [endpoint] = [
        endpoint
        for monitor in overlay("production").of_kind("ServiceMonitor")
        if monitor["metadata"]["name"] == "inference"
        for endpoint in monitor["spec"]["endpoints"]
    ]
    operators = [
        {"source_labels": rule["sourceLabels"], "regex": rule["regex"], "action": rule["action"]}
        for rule in endpoint["metricRelabelings"]
    ]
    assert operators == dropped_by_compose()
    for rule in (*ALERTS.values(), *RECORDS.values()):
        assert not any(re.fullmatch(regex, metric(each)) for each in selectors(rule["expr"]))


def dropped_by_compose() -> list[dict[str, Any]]:
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    [job] = [each for each in config["scrape_configs"] if each["job_name"] == "inference"]
    return list(job["metric_relabel_configs"])


def alert_tests(name: str) -> list[dict[str, Any]]:
    evaluations = [each for test in unit_tests() for each in test.get("alert_rule_test", [])]
    return [each for each in evaluations if each["alertname"] == name]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_shown_to_fire_and_not_to_fire(name):
    outcomes = {bool(each["exp_alerts"]) for each in alert_tests(name)}
    assert outcomes == {True, False}


def test_every_test_is_of_an_alert():
    """promtool is silent about alerts that there are not."""
    tested = {e["alertname"] for test in unit_tests() for e in test.get("alert_rule_test", [])}
    assert tested == ALERTS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_a_recording_rule_is_shown_to_give_values(name):
    expected = [
        each["exp_samples"]
        for test in unit_tests()
        for each in test.get("promql_expr_test", [])
        if each["expr"] == name
    ]
    assert expected
    assert all(expected)


@pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS.keys())
def test_an_alert_says_what_is_needed(alert: Rule):
    name, annotations = alert["alert"], alert["annotations"]
    assert re.fullmatch(r"Loadout([A-Z][a-z]+)+", name)
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    whose = "job" if alert["expr"].startswith("group by (cluster, namespace, job)") else "instance"
    assert f"{{{{ $labels.{whose} }}}}" in annotations["summary"]
    assert f"{{{{ $labels.{whose} }}}}" in annotations["description"]
    # What counts events of the last minutes fires at once; what goes up and down waits.
    looks_back = re.search(r"\b(increase|changes|max_over_time)\(.*\[(15|30)m\]\)", alert["expr"])
    assert not re.search(r"\b(job|namespace|cluster)\s*[=!]", alert["expr"]), (
        "they are the reader's"
    )
    assert ("for" in alert) != bool(looks_back)
    page, _, anchor = annotations["runbook_url"].partition("#")
    assert (page, anchor) == ("docs/operations/runbook.md", name.lower())


def paragraphs() -> dict[str, str]:
    """Returns the runbook's paragraphs by alert."""
    [chapter] = re.findall(r"^## Alerts$(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    _, *parts = re.split(r"^### ", chapter, flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in parts)


def test_every_alert_has_its_paragraph_and_no_other_has():
    assert list(paragraphs()) == list(ALERTS)
    for name, text in paragraphs().items():
        assert len(text.split()) > 50, name
        for other in re.findall(r"\bLoadout[A-Z]\w+", text):
            assert other in ALERTS, f"{name} points to {other}"


def test_every_paragraph_names_panels_that_there_are():
    """In italics: a panel, and before or after it the dashboard that it is on."""
    boards = [json.loads(path.read_text()) for path in GRAFANA.glob("*.json")]
    titles = {board["title"].removeprefix("Loadout: ") for board in boards}
    panels = {panel["title"] for board in boards for panel in board["panels"]}
    for name, text in paragraphs().items():
        named = {" ".join(each.split()) for each in re.findall(r"\*([^*`]+)\*", text)}
        assert named & titles, f"{name}: on no dashboard"
        assert named & panels, f"{name}: on no panel"
        assert named <= titles | panels, name


@pytest.mark.parametrize("name", RECORDS)
def test_recorded_names_say_what_they_are(name):
    """level:metric:operations, of a metric that there is."""
    level, base, operations = name.split(":")
    assert level in ("instance", "instance_tier")
    assert re.fullmatch(r"((ratio|p90|p99)_)?rate5m|ratio", operations)
    words = RECORDS[name]["expr"]
    sources = {SUFFIXES.sub("", metric(each)).removesuffix("_total") for each in selectors(words)}
    stem = re.match(r"loadout_(inference|store)_", base)
    assert stem, base
    assert all(stem[0] in source for source in sources)


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_recorded_is_used(name):
    others = [rule["expr"] for rule in (*ALERTS.values(), *RECORDS.values())]
    assert any(name in selectors(expression) for expression in map(bare, others))


def bare(expression: str) -> str:
    """Without matchers."""
    return re.sub(r"\{[^}]*\}", "", expression)


def known_metrics() -> set[str]:
    sections = [*STORE_SECTIONS.values(), *INFERENCE_SECTIONS.values()]
    return {definition.exposed_name for section in sections for definition in section}


@pytest.mark.parametrize("rule", [*ALERTS.values(), *RECORDS.values()], ids=[*ALERTS, *RECORDS])
def test_every_metric_of_a_rule_exists(rule: Rule):
    found = {metric(each) for each in selectors(rule["expr"])}
    assert found
    for name in found - {"up"}:
        known = known_metrics() | RECORDS.keys()
        assert name in known or SUFFIXES.sub("", name) in known, name
