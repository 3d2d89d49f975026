"""Probes ask what is served, in time; and who is to end may finish."""

from __future__ import annotations

import pytest

from loadout.health.__main__ import parse_arguments
from tests.support.deploy.manifests import Object, Workload
from tests.support.deploy.probes import END_SECONDS, LAST_SECONDS, SERVICES

START_SECONDS = 1.0
"""Time to start the process of a probe that has one."""


def asked(probe: Object) -> tuple[int, str]:
    """(port, service) that a probe asks for."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service", "")
    wanted = parse_arguments(probe["exec"]["command"][3:])
    host, _, port = wanted.address.partition(":")
    assert host == "127.0.0.1"
    return int(port), wanted.service


def test_probes_ask_for_a_service_that_is_served(workload):
    for kind, probe in workload.probes.items():
        port, service = asked(probe)
        assert port == workload.ports["grpc"]
        allowed = {SERVICES[workload.module]}
        if kind == "liveness":
            allowed.add("")
        assert service in allowed


def test_probes_speak_tls_where_the_service_does(workload, settings):
    """The kubelet's own do not, in any version but the newest behind a gate."""
    for probe in workload.probes.values():
        if settings.tls_cert_file is None:
            assert "grpc" in probe
            continue
        wanted = parse_arguments(probe["exec"]["command"][3:])
        assert wanted.ca.parent == settings.tls_cert_file.parent
        # A Service that the certificate is for; a second inference service shares the first's.
        certificate = workload.mount_of(str(settings.tls_cert_file))["secret"]["secretName"]
        assert wanted.server_name in (workload.name, certificate.removesuffix("-tls"))


def test_a_process_has_time_to_start(workload):
    for probe in workload.probes.values():
        if "exec" in probe:
            wanted = parse_arguments(probe["exec"]["command"][3:])
            assert probe["timeoutSeconds"] >= wanted.timeout + START_SECONDS


@pytest.mark.parametrize(("kind", "seconds"), [("startup", 300), ("liveness", 60)])
def test_probes_are_patient(workload, kind, seconds):
    """A model is large, a busy loop is not a dead one; but who is not ready goes at once."""
    probe = workload.probes[kind]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= seconds
    ready = workload.probes["readiness"]
    assert ready["periodSeconds"] * ready["failureThreshold"] <= 20


def test_the_grace_period_holds_the_drain(workload, settings):
    sleep = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    ready = workload.probes["readiness"]
    assert sleep >= ready["periodSeconds"], "until nobody is sent here any more"
    needed = sleep + settings.grace_seconds + LAST_SECONDS + END_SECONDS
    assert workload.pod["terminationGracePeriodSeconds"] >= needed


def test_a_rollout_leaves_somebody_serving(workload: Workload):
    spec, kind = workload.spec, workload.object["kind"]
    if kind == "Deployment":
        update = spec["strategy"]["rollingUpdate"]
        assert update["maxSurge"] + update["maxUnavailable"] == 1
    elif kind == "DaemonSet":
        assert spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 1
    elif kind == "LeaderWorkerSet":
        update = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert update["maxSurge"] + update["maxUnavailable"] == 1
    else:
        assert spec["podManagementPolicy"] == "Parallel", "they wait for no other to start"
