"""What points at something points at something that is there: labels, ports, config, addresses."""

from __future__ import annotations

import re

import pytest

from tests.support.deploy.manifests import (
    Manifests,
    Object,
    Workload,
    all_workloads,
    matches,
    overlay,
)
from tests.support.deploy.page import DOCUMENTED

CLAIM = "PersistentVolumeClaim"


def pods_of(manifests: Manifests, selector: Object) -> list[Workload]:
    return [each for each in manifests.workloads if matches(selector, each.labels)]


def test_workloads_select_their_own_pods(manifests):
    for workload in manifests.workloads:
        assert pods_of(manifests, workload.spec["selector"]) == [workload]
        for spread in workload.pod.get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"], workload.labels)


def test_services_have_pods_with_their_ports(manifests):
    for service in manifests.of_kind("Service"):
        [workload] = manifests.workloads_with(service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert port["targetPort"] == port["name"], "ports have one name everywhere"
            assert workload.ports[port["name"]] == port["port"]


def test_a_stateful_set_has_its_service(manifests):
    for each in manifests.of_kind("StatefulSet"):
        service = manifests.named("Service", each["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"


def test_disruption_budgets_hold_up_no_drain(manifests):
    budgets = manifests.of_kind("PodDisruptionBudget")
    covered = []
    for budget in budgets:
        [workload] = pods_of(manifests, budget["spec"]["selector"])
        assert budget["spec"]["maxUnavailable"] == 1
        covered.append(workload.name)
    # A drain passes the pods of a DaemonSet over.
    drained = [each for each in manifests.workloads if each.object["kind"] != "DaemonSet"]
    assert sorted(covered) == sorted(each.name for each in drained)


def test_service_accounts_are_there_and_mount_no_token(manifests):
    for workload in manifests.workloads:
        account = manifests.named("ServiceAccount", workload.pod["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False
        assert workload.pod["automountServiceAccountToken"] is False


def test_config_maps_are_there_and_roll_the_pods(workload):
    names = [
        source["configMapRef"]["name"]
        for container in workload.all_containers
        for source in container["envFrom"]
        if "configMapRef" in source
    ]
    assert names
    for name in names:
        workload.manifests.named("ConfigMap", name)
        assert re.search(r"-[a-z0-9]{10}$", name), "a change of content changes the name"


def test_secrets_and_volumes_are_made_by_nobody_and_documented(workload):
    assert not workload.manifests.of_kind("Secret"), "secrets do not lie in a repository"
    assert (workload.secrets | claims(workload)) <= DOCUMENTED


def claims(workload: Workload) -> set[str]:
    """Returns the claims of a pod that the manifests do not have."""
    made = {each["metadata"]["name"] for each in workload.manifests.of_kind(CLAIM)}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in workload.pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    return used - made


def test_a_volume_and_its_claim_are_for_each_other(manifests):
    """Neither waits for, nor is taken by, anything else."""
    for volume in manifests.of_kind("PersistentVolume"):
        reference = volume["spec"]["claimRef"]
        claim = manifests.named(CLAIM, reference["name"])
        assert (reference["apiVersion"], reference["kind"]) == ("v1", CLAIM)
        assert reference["namespace"] == claim["metadata"]["namespace"]
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        for field in ("accessModes", "storageClassName"):
            assert claim["spec"][field] == volume["spec"][field]
        assert claim["spec"]["storageClassName"] == "", "no class makes another volume for it"


def test_inference_finds_its_nodes_socket():
    """One folder of each node that has both, which inference cannot write to. The volume itself is
    not read-only: else no pod that comes first would give the folder to the group of both."""
    manifests = overlay("node-local-store")
    [store, inference] = [
        manifests.workloads_with({"app.kubernetes.io/name": name})[0]
        for name in ("adapter-store-node", "inference")
    ]
    socket = store.environment["LOADOUT_STORE_SHARE_SOCKET"]
    assert inference.environment["LOADOUT_INFERENCE_STORE_SHARE_SOCKET"] == socket
    ours, theirs = store.mount_of(socket), inference.mount_of(socket)
    assert ours["persistentVolumeClaim"] == theirs["persistentVolumeClaim"]
    assert ours["persistentVolumeClaim"].keys() == {"claimName"}
    assert theirs["mount"]["readOnly"] is True
    for field in ("runAsUser", "fsGroup"):
        assert store.pod["securityContext"][field] == inference.pod["securityContext"][field]
    claim = manifests.named(CLAIM, ours["persistentVolumeClaim"]["claimName"])
    volume = manifests.named("PersistentVolume", claim["spec"]["volumeName"])
    [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    nodes = {each["key"]: each["values"] for each in term["matchExpressions"]}
    assert nodes == {key: [value] for key, value in store.pod["nodeSelector"].items()}


def test_claims_are_for_all_replicas(manifests):
    for claim in manifests.of_kind(CLAIM):
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_nothing_else_is_documented_as_needed():
    found = [workload for _, workload in all_workloads()]
    used = {name for workload in found for name in workload.secrets | claims(workload)}
    assert used == DOCUMENTED


def test_listening_ports_are_the_containers(workload):
    prefix = {"adapter_store": "LOADOUT_STORE", "inference_svc": "LOADOUT_INFERENCE"}
    for name, setting in (("grpc", "LISTEN"), ("metrics", "METRICS_LISTEN")):
        address = workload.environment[f"{prefix[workload.module]}_{setting}"]
        assert address == f"0.0.0.0:{workload.ports[name]}"


def test_inference_finds_a_store(workload):
    if workload.module != "inference_svc":
        return
    inference, manifests = workload, workload.manifests
    host, _, port = inference.environment["LOADOUT_INFERENCE_STORE"].partition(":")
    service = manifests.named("Service", host)
    [store] = manifests.workloads_with(service["spec"]["selector"])
    assert store.module == "adapter_store"
    assert int(port) == store.ports["grpc"]
    is_local = service["spec"].get("internalTrafficPolicy") == "Local"
    if is_local:
        assert store.object["kind"] == "DaemonSet"
        for field in ("nodeSelector", "tolerations"):
            assert store.pod[field] == inference.pod[field], "on the same nodes"
    else:
        assert service["spec"]["clusterIP"] == "None", "every replica by its own address"


@pytest.mark.parametrize("port", ["grpc", "metrics"])
def test_ports_are_named(workload, port):
    assert port in workload.ports
