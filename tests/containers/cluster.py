"""A cluster of one node, as far as our manifests need one: its controllers, Services, DNS and
NetworkPolicies are here, its pods are Podman's. Nothing is scheduled, and the address of a Service
is that of a ready pod."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.containers import firewall
from tests.containers.dns import GATEWAY, SUBNET, Dns
from tests.containers.play import Provided
from tests.containers.pods import NETWORK, Pod
from tests.support.deploy.manifests import Manifests, Workload
from tests.support.deploy.policies import Peer, visitors
from tools.containers.engine import ContainersFailed, podman, run
from tools.containers.images import CPU_IMAGE

START_S = 180.0
NAMESPACE = "loadout-dev"
GROUP = 65532
"""Of our pods, which may read Secrets."""
PODS = "10.119.0.0/25"
"""The addresses that pods are given; visitors choose theirs, by which policies know them."""


class Cluster:
    """Applies manifests and keeps their pods and names in line until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._dns = Dns(folder, NAMESPACE)
        self.provided = Provided(folder, self._dns.resolv_conf)
        self.pods: dict[str, list[Pod]] = {}
        """By the workload's name, the oldest first."""
        self._ready: set[Pod] = set()
        self._leaders: dict[str, Pod] = {}
        """Of LeaderWorkerSets, by their names in DNS."""
        self._manifests: Manifests | None = None
        self._numbers = itertools.count()
        self._changed = threading.Lock()
        self._blocks = firewall.blocks(visitors(""))
        self._free = {kind: itertools.cycle(block) for kind, block in self._blocks.items()}
        _remove_all()
        options = ("--disable-dns", "--subnet", SUBNET, "--gateway", GATEWAY, "--ip-range", PODS)
        podman("network", "create", *options, NETWORK)
        _fix_gateway_address()

    def run_options(self, token: str = "", visitor: str = "both") -> list[str]:
        """Options of `podman run` for a pod of a user's: an address by which policies know what
        kind of visitor it is, the services' addresses, and with a token what TLS needs."""
        resolv_conf = f"{self._dns.resolv_conf}:/etc/resolv.conf:ro"
        options = ["--rm", "--network", NETWORK, "--label", "loadout-test", "--volume", resolv_conf]
        options += ["--ip", str(next(self._free[visitor]))]
        variables = {
            "LOADOUT_STORE": "adapter-store:7070",
            "LOADOUT_INFERENCE": "inference-replicas:7080",
        }
        if token:
            folder = self.provided.secret_folder("inference-tls")
            options += ["--group-add", str(GROUP), "--volume", f"{folder}:/mnt/tls:ro"]
            variables |= {"LOADOUT_TOKEN": token, "LOADOUT_TLS_CA_FILE": "/mnt/tls/ca.crt"}
        for name, value in variables.items():
            options += ["--env", f"{name}={value}"]
        return options

    def apply(self, manifests: Manifests, replicas: dict[str, int] | None = None) -> None:
        """Brings workloads to what `manifests` say, the stores first, each as its strategy has it.
        `replicas` are those of workloads that leave them to an autoscaler."""
        self._manifests = manifests
        for workload in sorted(manifests.workloads, key=lambda each: each.name):
            if workload.object["kind"] == "LeaderWorkerSet":
                self._start_group(workload)
                continue
            count = workload.spec.get("replicas", (replicas or {}).get(workload.name, 1))
            self._roll(workload, count)

    def _roll(self, workload: Workload, count: int) -> None:
        """Replaces pods one by one: those of a StatefulSet under their own names, and of a
        Deployment a new one first where its strategy allows one more."""
        old = self.pods.setdefault(workload.name, [])[:]
        surge = workload.spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
        for index in range(max(count, len(old))):
            before = old[index] if index < len(old) else None
            if before and not surge:
                self.terminate(before)
            if index < count:
                self.start(workload, index)
            if before and surge:
                self.terminate(before)

    def start(self, workload: Workload, index: int) -> Pod:
        """Starts one pod and waits until it is ready."""
        stable = workload.object["kind"] != "Deployment"
        pod = self._create(workload, str(index if stable else next(self._numbers)))
        pod.run()
        self.wait_ready(pod)
        return pod

    def _create(self, workload: Workload, suffix: str) -> Pod:
        pod = Pod(workload, f"{workload.name}-{suffix}", self.provided)
        self.pods.setdefault(workload.name, []).append(pod)
        self._enforce_policies()
        return pod

    def _start_group(self, leader: Workload) -> None:
        """Starts the first group of a LeaderWorkerSet, a leader and a worker, with the names that
        it gives them. Both wait for each other, and so the leader has an address before it is
        ready."""
        assert self._manifests is not None
        assert leader.spec["leaderWorkerTemplate"]["size"] == 2
        [worker] = [each for each in self._manifests.workers if each.name == leader.name]
        pods = [self._create(leader, "0"), self._create(worker, "0-1")]
        self._leaders[f"{pods[0].name}.{leader.name}"] = pods[0]
        self._publish()
        for pod in pods:
            pod.run()
        for pod in pods:
            self.wait_ready(pod)

    def wait_ready(self, pod: Pod) -> None:
        """By its startup and readiness probes, at their periods; it is then in its Services."""
        end = time.monotonic() + START_S
        for kind in ("startup", "readiness"):
            while not pod.probe(kind):
                assert time.monotonic() < end, f"{pod.name} is not {kind}:\n{pod.logs()[-4000:]}"
                time.sleep(pod.workload.probes[kind]["periodSeconds"])
        self._publish(ready=pod)

    def terminate(self, pod: Pod) -> None:
        """Takes it out of its Services and ends it; see `Pod.terminate`."""
        self._publish(gone=pod)
        self.pods[pod.workload.name].remove(pod)
        pod.terminate()
        if any(self.pods.values()):
            self._enforce_policies()

    def _enforce_policies(self) -> None:
        """In every pod, as each that comes or goes changes whom the others may reach."""
        assert self._manifests is not None
        policies = self._manifests.of_kind("NetworkPolicy")
        pods = {pod: Peer.of(pod.workload) for pods in self.pods.values() for pod in pods}
        [namespace] = {peer.namespace for peer in pods.values()}
        others = {str(self._blocks[kind]): peer for kind, peer in visitors(namespace).items()}
        for own, peer in pods.items():
            ours = {pod.ip: other for pod, other in pods.items() if pod is not own}
            firewall.enforce(policies, own.infra_process_id, peer, {**others, **ours})

    def addresses(self, service: str) -> list[str]:
        """The addresses of the ready pods of a Service."""
        assert self._manifests is not None
        selector = self._manifests.named("Service", service)["spec"]["selector"]
        found = [pod for pods in self.pods.values() for pod in pods if pod in self._ready]
        return [pod.ip for pod in found if selector.items() <= pod.workload.labels.items()]

    def _publish(self, ready: Pod | None = None, gone: Pod | None = None) -> None:
        assert self._manifests is not None
        with self._changed:
            self._ready = (self._ready | {ready} if ready else self._ready) - {gone}
            names = [each["metadata"]["name"] for each in self._manifests.of_kind("Service")]
            addresses = {name: self.addresses(name) for name in names}
            leaders = {name: [pod.ip] for name, pod in self._leaders.items()}
            self._dns.publish(addresses | leaders)

    def close(self) -> None:
        self._dns.close()
        _remove_all()


def _fix_gateway_address() -> None:
    """A bridge takes the lowest hardware address of its ports, until it is given one: as pods come
    and go, others would lose DNS for seconds. A container keeps the bridge there."""
    labels = ("--label", "loadout-test", "--network", NETWORK)
    podman("run", "--detach", *labels, CPU_IMAGE, "sleep", "infinity")
    bridge = podman("network", "inspect", NETWORK, "--format", "{{.NetworkInterface}}").strip()
    address = Path("/sys/class/net", bridge, "address").read_text().strip()
    run("ip", "link", "set", "dev", bridge, "address", address)


def _remove_all() -> None:
    """What this or an earlier run left."""
    for pod in podman("pod", "ls", "--filter", "label=loadout-test", "--quiet").split():
        podman("pod", "rm", "--force", "--time", "0", pod)
    for container in podman("ps", "--all", "--quiet", "--filter", "label=loadout-test").split():
        podman("rm", "--force", "--time", "0", container)
    for volume in podman("volume", "ls", "--quiet", "--filter", "label=loadout-test").split():
        podman("volume", "rm", "--force", volume)
    with suppress(ContainersFailed):
        podman("network", "rm", NETWORK)
