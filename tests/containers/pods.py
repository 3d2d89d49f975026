"""Pods that Podman plays, and what a kubelet does to them beyond that."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.containers.play import Provided, pod_objects
from tests.support.deploy.manifests import Object, Workload
from tools.containers.engine import ContainersFailed, environment, podman

NETWORK = "loadout-test"
RESTART_S = 60.0


class Pod:
    """A pod of `workload`, from its creation until it is terminated or removed. It has a network
    before `run` starts its containers."""

    def __init__(self, workload: Workload, name: str, provided: Provided) -> None:
        self.workload, self.name = workload, name
        self.container = f"{name}-{workload.container['name']}"
        file = provided.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all(pod_objects(workload, name, provided)))
        podman("kube", "play", "--start=false", "--network", NETWORK, str(file))
        infra = podman("pod", "inspect", name, "--format", "{{.InfraContainerID}}").strip()
        podman("start", infra)
        [found] = yaml.safe_load(podman("inspect", infra))
        self.ip = str(found["NetworkSettings"]["Networks"][NETWORK]["IPAddress"])
        self.infra_process_id = int(found["State"]["Pid"])

    def run(self) -> None:
        """Starts what runs before, to its end, and then the container."""
        try:
            podman("pod", "start", self.name)
        except ContainersFailed as error:
            names = [each["name"] for each in self.workload.all_containers]
            logs = [_try("logs", f"{self.name}-{each}").stderr for each in names]
            raise ContainersFailed("\n".join([str(error), *logs])) from None

    def probe(self, kind: str) -> bool:
        """Asks once what the probe asks: "startup", "readiness" or "liveness"."""
        probe = self.workload.probes[kind]
        if "exec" in probe:
            try:
                done = self.execute(*probe["exec"]["command"], timeout_s=probe["timeoutSeconds"])
            except subprocess.TimeoutExpired:
                return False
            return done.returncode == 0
        if "httpGet" in probe:
            get = probe["httpGet"]
            url = f"http://{self.ip}:{self.workload.ports[get['port']]}{get['path']}"
            try:
                with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]):
                    return True
            except OSError:
                return False
        request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
        with grpc.insecure_channel(f"{self.ip}:{probe['grpc']['port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(request, timeout=probe["timeoutSeconds"])
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def execute(
        self, *command: str, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container. Raises TimeoutExpired."""
        return _try("exec", self.container, *command, timeout_s=timeout_s)

    def inspect(self, container: str = "") -> Object:
        """What Podman knows of its container, or of another one of the pod."""
        name = f"{self.name}-{container}" if container else self.container
        [found] = yaml.safe_load(podman("inspect", name))
        return dict(found)

    def logs(self) -> str:
        done = _try("logs", self.container)
        return done.stdout + done.stderr

    def terminate(self) -> None:
        """Ends it as a kubelet does: preStop, SIGTERM, and SIGKILL at the end of the grace, which
        it must not need."""
        start = time.monotonic()
        time.sleep(self.workload.container["lifecycle"]["preStop"]["sleep"]["seconds"])
        grace = self.workload.pod["terminationGracePeriodSeconds"]
        left = round(grace - (time.monotonic() - start))
        podman("stop", "--time", str(left), self.container)
        seconds = time.monotonic() - start
        code = int(self.inspect()["State"]["ExitCode"])
        assert (code, seconds < grace) == (0, True), f"{self.name}: {seconds} s\n{self.logs()}"
        self.remove()

    def kill(self) -> None:
        """SIGKILL to the container's first process; returns when it has started again, as it does
        in a cluster."""
        killed = self.process_id
        assert killed > 0, f"{self.container} is not running"
        os.kill(killed, signal.SIGKILL)
        self.wait_restarted(killed)

    def wait_restarted(self, ended: int) -> None:
        """Waits until another first process runs than the one that has ended, or is about to."""
        end = time.monotonic() + RESTART_S
        while self.process_id in (0, ended):
            assert time.monotonic() < end, f"{self.container} has not started again"
            time.sleep(0.5)

    @property
    def process_id(self) -> int:
        """Of the container's first process; 0: it does not run."""
        return int(self.inspect()["State"]["Pid"])

    def remove(self) -> None:
        podman("pod", "rm", "--force", "--time", "0", self.name)


def _try(*arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["podman", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
