"""The overlay `node-local-store`, which is `production` and a store beside each GPU node's
inference, from the images: PostgreSQL, S3, TLS, tokens. Inference runs the CUDA image, on CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.backing import KEYS, S3Server, start_postgres
from tests.containers.callers import Callers
from tests.containers.cluster import Cluster
from tests.containers.pod_checks import CHECKS
from tests.containers.pods import Pod
from tests.containers.reach_checks import check_pods, check_visitors
from tests.containers.shared_pulls import pulls_by_way
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_lines, token_of
from tests.support.deploy.manifests import ROOT, Manifests, compose
from tools.containers.engine import podman
from tools.containers.images import CPU_IMAGE

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(900)]

MODEL = ROOT / "loadout" / "demo" / "assets" / "model"
REPLICAS = {"inference": 2, "adapter-store-node": 1}
"""An upgrade has no GPU for a further replica of inference: one goes before one comes."""
STORE_SIZES = (
    "LOADOUT_STORE_IMAGE_MEMORY=64MiB",
    "LOADOUT_STORE_DISK_CACHE_BYTES=1GiB",
    "LOADOUT_STORE_FETCHED_BYTES=1GiB",
)
INFERENCE = (
    "LOADOUT_INFERENCE_DEVICE=cpu",
    "LOADOUT_INFERENCE_BASE_MODEL=loadout-demo",
    "LOADOUT_INFERENCE_ADAPTER_MEMORY=32MiB",
    "LOADOUT_INFERENCE_HOST_MEMORY=0",
    "LOADOUT_INFERENCE_KV_MEMORY=32MiB",
)


CONNECT = """
import socket, sys
try:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    print(connection.recv(100))
except OSError as error:
    print(error.strerror)
"""


def manifests() -> Manifests:
    """As somebody's own overlay has them, with sizes of this machine."""
    store = (
        "LOADOUT_STORE_SHARED_S3=s3://loadout-store/test",
        f"LOADOUT_STORE_SHARED_S3_ENDPOINT_URL={S3Server.url}",
        *STORE_SIZES,
    )
    changes = {"adapter-store": store, "adapter-store-node": STORE_SIZES, "inference": INFERENCE}
    return compose(
        "node-local-store",
        configMapGenerator=[
            {"name": f"{name}-config", "behavior": "merge", "literals": list(literals)}
            for name, literals in changes.items()
        ],
    )


def put_secrets(cluster: Cluster, folder: Path, dsn: str) -> None:
    """The Secrets that docs/kubernetes.md names."""
    authority = Authority(folder)
    for service, others in (
        ("adapter-store", ("adapter-store-replicas", "adapter-store-node")),
        ("inference", ("inference-replicas",)),
    ):
        chain, key = authority.issue(service, service, *others)
        files = {"tls.crt": chain.read_bytes(), "tls.key": key.read_bytes()}
        put(cluster, f"{service}-tls", {**files, "ca.crt": authority.pem})
    lines = (
        token_lines("inference", ["server"], ["*"]),
        token_lines("trainer", ["publisher"], ["default"]),
        token_lines("backend", ["caller"], ["default"]),
        token_lines("operations", ["operator"], ["default"]),
    )
    put(cluster, "loadout-policy", {"policy.toml": "\n".join(lines).encode()})
    put(cluster, "inference-store-token", {"token": token_of("inference").encode()})
    put(cluster, "adapter-store-catalog", {"dsn": dsn.encode()})
    put(cluster, "adapter-store-s3", KEYS)


def put(cluster: Cluster, name: str, values: dict[str, bytes]) -> None:
    cluster.provided.put_secret(name, values, group=65532)


@pytest.fixture(scope="module")
def production(cluster: Cluster, tmp_path_factory) -> Iterator[Cluster]:
    storage = S3Server("loadout-store")
    try:
        put_secrets(cluster, tmp_path_factory.mktemp("secrets"), start_postgres())
        cluster.provided.claims["base-model"] = MODEL
        cluster.apply(manifests(), REPLICAS)
        yield cluster
    finally:
        storage.close()


@pytest.fixture
def pods(production) -> list[Pod]:
    return [pod for pods in production.pods.values() for pod in pods]


def test_every_replica_is_there(production):
    counts = {name: len(found) for name, found in production.pods.items()}
    assert counts == {"adapter-store": 3, "adapter-store-node": 1, "inference": 2}


@pytest.mark.parametrize("check", CHECKS)
def test_containers_are_as_the_manifest_says(pods, check):
    for pod in pods:
        check(pod)


@pytest.mark.parametrize("check", [check_pods, check_visitors])
def test_connections_are_those_of_the_policies(production, check):
    """PostgreSQL and S3 are reached on the ports that they have everywhere."""
    check(production)


def test_trainers_register_and_backends_generate(production, command):
    trainer, backend = token_of("trainer"), token_of("backend")
    source = "/opt/loadout/demo/adapters/upper"
    said = command("loadout", "register", "upper", source, token=trainer)
    assert "\nservable by" in said
    text = command(
        "loadout", "generate", "--adapter", "upper", "--temperature", "0", "hello=", token=backend
    )
    assert text.startswith("HELLO")


def test_images_cross_the_node_as_files_in_memory(production, command):
    """From the second load on: the first may come while the node's store builds the image."""
    trainer, operations = token_of("trainer"), token_of("operations")
    command("loadout", "register", "sort", "/opt/loadout/demo/adapters/sort", token=trainer)
    for change in ("load", "unload"):
        command("loadout", change, "sort", "--every-replica", token=operations)
    pods = [*production.pods["adapter-store-node"], *production.pods["inference"]]
    pages = [f"{pod.ip}:{pod.workload.ports['metrics']}" for pod in pods]
    before = [pulls_by_way(page) for page in pages]
    command("loadout", "load", "sort", "--every-replica", token=operations)
    new = [pulls_by_way(page) - known for page, known in zip(pages, before, strict=True)]
    assert [set(each) for each in new] == [{"shared"}] * 3


@pytest.mark.parametrize(
    ("user", "answer"), [(65532, "b'loadout share"), (65533, "Permission denied")]
)
def test_only_the_services_user_connects_to_the_socket(production, user, answer):
    """Not even one of its group that mounts the folder."""
    [store] = production.pods["adapter-store-node"]
    socket = Path(store.workload.environment["LOADOUT_STORE_SHARE_SOCKET"])
    claim = store.workload.mounts[str(socket.parent)]["persistentVolumeClaim"]["claimName"]
    options = ("--rm", "--network", "none", "--user", f"{user}:65532", "--label", "loadout-test")
    volume = ("--volume", f"{claim}:{socket.parent}")
    command = ("python", "-c", CONNECT, str(socket))
    assert podman("run", *options, *volume, CPU_IMAGE, *command).startswith(answer)


def test_inference_goes_on_when_its_nodes_store_is_killed(production, pods):
    [store] = production.pods["adapter-store-node"]
    with Callers(production, "upper", "", token=token_of("backend")) as callers:
        store.kill()
        production.wait_ready(store)
    assert callers.failures == []
    assert callers.answered > 0


def test_every_pod_is_replaced_under_load(production, pods):
    """As an upgrade replaces them, one by one."""
    old = {pod.inspect()["Id"] for pod in pods}
    with Callers(production, "upper", "", token=token_of("backend")) as callers:
        production.apply(manifests(), REPLICAS)
    new = {pod.inspect()["Id"] for pods in production.pods.values() for pod in pods}
    assert len(new) == len(old)
    assert new.isdisjoint(old)
    assert callers.failures == []
    assert callers.answered > 0


def test_a_replaced_secret_is_taken_over(production, command):
    """A Secret's new content appears by a link; nobody sends a signal."""
    lines = [token_lines(name, ["caller"], ["default"]) for name in ("backend", "another")]
    lines.append(token_lines("inference", ["server"], ["*"]))
    put(production, "loadout-policy", {"policy.toml": "\n".join(lines).encode()})
    end = time.monotonic() + 60
    while True:
        try:
            command(
                "loadout", "generate", "--temperature", "0", "hello=", token=token_of("another")
            )
        except AssertionError:
            assert time.monotonic() < end
            time.sleep(1)
        else:
            break
    with pytest.raises(AssertionError, match="token"):
        command("loadout", "adapters", token=token_of("trainer"))
