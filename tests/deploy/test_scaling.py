"""Autoscalers and monitors watch what is there: pods, ports, metrics that the code exports."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    ROOT,
    SCALED_TO_ZERO,
    Manifests,
    Object,
    matches,
    overlay,
)
from tests.support.deploy.rules import promtool
from tests.support.deploy.scaling import METRIC, WOKEN_BY, targets

pytestmark = pytest.mark.processes  # kubectl builds what they read

PREFIXES = {"adapter_store": "loadout_store_", "inference_svc": "loadout_inference_"}


def exported(module: str) -> set[str]:
    """Names of metrics that a service's code defines: whole, or what follows its prefix."""
    found = set()
    for path in (ROOT / module).rglob("*.py"):
        text = path.read_text()
        if PREFIXES[module] not in text:
            continue
        literals = {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        names = {literal for literal in literals if re.fullmatch(r"[a-z][a-z0-9_:]*", literal)}
        found |= names | {PREFIXES[module] + name for name in names}
    return found


def scaled_replicas(thing: Object) -> tuple[int, int]:
    spec = thing["spec"]
    if thing["kind"] == "ScaledObject":
        return spec["minReplicaCount"], spec["maxReplicaCount"]
    return spec["minReplicas"], spec["maxReplicas"]


def autoscalers(manifests: Manifests) -> list[Object]:
    return manifests.of_kind("HorizontalPodAutoscaler", "ScaledObject")


def test_one_autoscaler_scales_inference_where_there_are_gpus(manifests):
    found = autoscalers(manifests)
    on_gpus = [
        each.name
        for each in manifests.workloads
        if each.environment.get("LOADOUT_INFERENCE_DEVICE") == "cuda"
    ]
    assert sorted(each["spec"]["scaleTargetRef"]["name"] for each in found) == sorted(on_gpus)
    for each in found:
        reference = each["spec"]["scaleTargetRef"]
        target = manifests.named(reference["kind"], reference["name"])
        assert target["apiVersion"] == reference["apiVersion"]
        assert "replicas" not in target["spec"], "an apply would undo the autoscaler's decision"
        least, most = scaled_replicas(each)
        assert least < most
        assert least == (0 if manifests is overlay(SCALED_TO_ZERO) else 2)


@pytest.mark.parametrize("name", ["production", "production-keda", "node-local-store"])
def test_autoscalers_watch_metrics_that_are_exported(name):
    [found] = autoscalers(overlay(name))
    metrics = targets(found)
    assert metrics == targets(autoscalers(overlay("production"))[0]), "all scale alike"
    assert metrics.keys() <= exported("inference_svc")
    assert "loadout_inference_requests_waiting" in metrics


def test_a_busy_system_is_not_scaled_down_because_nobody_waits():
    """With a queue alone, replicas that have emptied it would go again."""
    [found] = autoscalers(overlay("production"))
    running = targets(found)["loadout_inference_requests_running"]
    [inference] = [w for w in overlay("production").workloads if w.module == "inference_svc"]
    most = int(inference.environment["LOADOUT_INFERENCE_MAX_SEQUENCES"])
    assert most / 2 <= running < most


def test_the_keda_overlay_has_no_other_autoscaler():
    assert [each["kind"] for each in autoscalers(overlay("production-keda"))] == ["ScaledObject"]


def test_what_the_code_does_not_export_is_noticed():
    assert "loadout_inference_requests_waited" not in exported("inference_svc")
    assert "loadout_store_pulls" in exported("adapter_store")


def test_the_prometheus_adapter_offers_the_autoscalers_metrics():
    values = yaml.safe_load((KUBERNETES / "components/hpa/prometheus-adapter.yaml").read_text())
    [rule] = values["rules"]["custom"]
    [autoscaler] = autoscalers(overlay("production"))
    [series] = re.findall(r'__name__=~"(.*?)"', rule["seriesQuery"])
    for metric in targets(autoscaler):
        assert re.fullmatch(series, metric)
        assert re.fullmatch(rule["name"]["matches"], metric)[1] == metric
    assert rule["name"]["as"] == "$1"


def test_keda_asks_about_its_own_namespace():
    manifests = overlay("production-keda")
    [scaled] = manifests.of_kind("ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        assert f'namespace="{scaled["metadata"]["namespace"]}"' in trigger["metadata"]["query"]


def test_without_replicas_what_comes_to_envoy_wakes_one():
    manifests = overlay(SCALED_TO_ZERO)
    [scaled] = manifests.of_kind("ScaledObject")
    *watched, arriving, _ = scaled["spec"]["triggers"]
    assert targets(overlay("production-keda").of_kind("ScaledObject")[0]) == {
        metric: int(trigger["metadata"]["threshold"])
        for trigger in watched
        for metric in METRIC.findall(trigger["metadata"]["query"])
    }
    # Inference has no series then; Envoy always has.
    assert {each["metadata"]["ignoreNullValues"] for each in watched} == {"true"}
    assert arriving["metadata"]["ignoreNullValues"] == "false"
    assert f'namespace="{scaled["metadata"]["namespace"]}"' in arriving["metadata"]["query"]
    assert f"{WOKEN_BY}{{" in arriving["metadata"]["query"]
    # One replica for however many requests: how many there are to be, the others say.
    assert int(arriving["metadata"]["threshold"]) >= 10**9
    # Longer than the longest start, so that what woke a replica does not have to come again.
    [inference] = [each for each in manifests.workloads if each.module == "inference_svc"]
    startup = inference.probes["startup"]
    longest_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert scaled["spec"]["cooldownPeriod"] >= longest_s
    assert scaled["spec"]["fallback"]["replicas"] >= 1


def test_when_no_replica_is_a_failure_and_which_keep_their_place(tmp_path):
    """By promtool, over what the operator and KEDA get."""
    manifests = overlay(SCALED_TO_ZERO)
    [scaled] = manifests.of_kind("ScaledObject")
    [rules] = manifests.of_kind("PrometheusRule")
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules["spec"]))
    text = Path(__file__).with_name("prometheus").joinpath("scaled-to-zero.yml").read_text()
    queries = {each["name"]: each["metadata"]["query"] for each in scaled["spec"]["triggers"]}
    for name, query in queries.items():
        text = text.replace(f"<{name}>", json.dumps(query))
    (tmp_path / "tests.yml").write_text(text)
    promtool("test", "rules", tmp_path / "tests.yml")


@pytest.fixture(scope="module")
def scaled_twice(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    """Two models, each of which scales to zero."""
    folder = tmp_path_factory.mktemp("two")
    kubernetes = os.path.relpath(KUBERNETES, folder / "first")
    for name, fields in {
        "first": {
            "resources": [f"{kubernetes}/overlays/production-keda"],
            "components": [f"{kubernetes}/components/keda-scale-to-zero"],
        },
        "second": {
            "resources": ["../first"],
            "components": [f"{kubernetes}/components/inference-only"],
            "transformers": [f"{kubernetes}/second"],
            "nameSuffix": "-second",
        },
        ".": {"resources": ["first", "second"]},
    }.items():
        (folder / name).mkdir(exist_ok=True)
        text = yaml.safe_dump({"namespace": "loadout", **fields})
        (folder / name / "kustomization.yaml").write_text(text)
    return Manifests.build(folder)


def test_two_models_of_a_namespace_scale_by_their_own_load(scaled_twice, tmp_path):
    """volcano-sh/kthena#868, by promtool, with the labels that the operator gives to series."""
    scaled = scaled_twice.of_kind("ScaledObject")
    assert sorted(each["metadata"]["name"] for each in scaled) == ["inference", "inference-second"]
    series, expected = [], []
    for number, each in enumerate(scaled, 1):
        name = each["metadata"]["name"]
        assert each["spec"]["scaleTargetRef"]["name"] == name
        service = f"inference-replicas{name.removeprefix('inference')}"
        assert scaled_twice.named("Service", service)["metadata"]["labels"]["loadout/metrics"]
        of_pods = f'{{namespace="loadout",job="inference",service="{service}"}}'
        of_envoy = f'{{namespace="loadout",envoy_http_conn_manager_prefix="{name}"}}'
        series += [
            (f"loadout_inference_requests_waiting{of_pods}", f"{number}x40"),
            (f"loadout_inference_requests_running{of_pods}", f"{10 * number}x40"),
            (f"{WOKEN_BY}{of_envoy}", f"0+{number}x40"),
            (f"up{of_pods}", "0x40" if number == 2 else "1x40"),
        ]
        values = {"waiting": number, "running": 10 * number, "arriving": 2 * number}
        values |= {"unscraped": 1} if number == 2 else {}
        for trigger in each["spec"]["triggers"]:
            value = values.get(trigger["name"])
            samples = [] if value is None else [{"labels": "{}", "value": value}]
            query = {"expr": trigger["metadata"]["query"], "eval_time": "20m"}
            expected.append(query | {"exp_samples": samples})
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": expected,
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", tmp_path / "tests.yml")


def test_every_pod_is_scraped_once(manifests):
    monitors = manifests.of_kind("ServiceMonitor")
    if not monitors:
        assert manifests in [overlay(name) for name in OVERLAYS if name.startswith("dev")]
        return
    scraped = []
    for monitor in monitors:
        for service in manifests.of_kind("Service"):
            if not matches(monitor["spec"]["selector"], service["metadata"]["labels"]):
                continue
            ports = {port["name"] for port in service["spec"]["ports"]}
            assert {each["port"] for each in monitor["spec"]["endpoints"]} <= ports
            scraped += manifests.workloads_with(service["spec"]["selector"])
    assert sorted(each.name for each in scraped) == sorted(e.name for e in manifests.workloads)


def test_scrapes_end_before_the_next_begins(manifests):
    for monitor in manifests.of_kind("ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            assert int(endpoint["scrapeTimeout"][:-1]) < int(endpoint["interval"][:-1])


def test_jobs_are_named_as_compose_names_them():
    config = yaml.safe_load(Path(ROOT, "deploy/compose/prometheus.yml").read_text())
    named = {each["job_name"] for each in config["scrape_configs"]}
    [*monitors] = overlay("production").of_kind("ServiceMonitor")
    replaced = {
        rule["replacement"]
        for monitor in monitors
        for endpoint in monitor["spec"]["endpoints"]
        for rule in endpoint["relabelings"]
        if rule["targetLabel"] == "job"
    }
    assert replaced == named
