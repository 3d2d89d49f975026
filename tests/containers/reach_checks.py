"""Who reaches whom in a cluster, by connections that are tried."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.containers.cluster import Cluster
from tests.containers.dns import GATEWAY
from tests.containers.pods import Pod
from tests.support.deploy.policies import OUTSIDE_PORTS, connections, may_enter, visitors
from tools.containers.engine import environment
from tools.containers.images import CPU_IMAGE

SCRIPT = (Path(__file__).parent / "reach.py").read_text()


def check_visitors(cluster: Cluster) -> None:
    """Clients reach what they are clients of, Prometheus the metrics, and nobody else anything."""
    pods = [pod for pods in cluster.pods.values() for pod in pods]
    for kind in visitors(""):
        wanted = {
            f"{pod.ip}:{port}"
            for pod in pods
            for name, port in pod.workload.ports.items()
            if may_enter(kind, pod.workload.module, name)
        }
        assert reached_by_visitor(cluster, kind, addresses(pods)) == wanted, kind


def check_pods(cluster: Cluster) -> None:
    """Each pod reaches the stores if it is a server, and outside what it is configured with."""
    pods = [pod for pods in cluster.pods.values() for pod in pods]
    stores = {
        f"{pod.ip}:{pod.workload.ports['grpc']}"
        for pod in pods
        if pod.workload.module == "adapter_store"
    }
    outside = {f"{GATEWAY}:{port}" for port in OUTSIDE_PORTS}
    for pod in pods:
        others = addresses(each for each in pods if each is not pod)
        wanted = {
            f"{GATEWAY}:{port}"
            for host, port, protocol in connections(pod.workload)
            if not host and protocol == "TCP"
        }
        if pod.workload.module == "inference_svc":
            wanted |= stores
        assert reached_by_pod(pod, others | outside) == wanted, pod.name


def addresses(pods: Iterable[Pod]) -> set[str]:
    return {f"{pod.ip}:{port}" for pod in pods for port in pod.workload.ports.values()}


def reached_by_visitor(cluster: Cluster, kind: str, wanted: set[str]) -> set[str]:
    options = cluster.run_options(visitor=kind)
    done = subprocess.run(
        ["podman", "run", *options, CPU_IMAGE, "python", "-c", SCRIPT, *wanted],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def reached_by_pod(pod: Pod, wanted: set[str]) -> set[str]:
    done = pod.execute("python", "-c", SCRIPT, *wanted)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
