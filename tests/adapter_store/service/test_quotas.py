"""Quotas as a caller meets them: before a fetch, under concurrency, and with their details."""

from __future__ import annotations

import threading

import grpc
import pytest

from tests.support.access.policies import ROOT, token_lines, token_of, write_policy
from tests.support.store.client import details

pytestmark = pytest.mark.slow


@pytest.fixture
def serve_with(serve, tmp_path):
    """serve_with("toml", ...): a store in which `root` and `a`, a publisher of team-a, may call."""

    def start(*lines: str, **settings):
        policy = write_policy(tmp_path, ROOT, token_lines("a", ["publisher"]), *lines)
        return serve(policy_file=policy, **settings)

    return start


def test_a_full_tenant_costs_no_fetch(serve_with, make_adapter, tmp_path, refused):
    served = serve_with("[tenants.team-a]\nmax_adapters = 1")
    client = served.connect(token_of("a"))
    folder = make_adapter()
    client.register("one", folder)
    with refused("RESOURCE_EXHAUSTED", "max_adapters", "team-a") as refusal:
        client.register("two", tmp_path / "nowhere")  # else NOT_FOUND
    found = details(refusal.error)
    assert found["ErrorInfo"].reason == "QUOTA_EXCEEDED"
    assert found["ErrorInfo"].metadata["subject"] == "max_adapters"
    assert found["QuotaFailure"].violations[0].subject == "max_adapters"
    assert "RetryInfo" not in found
    with refused("RESOURCE_EXHAUSTED", "max_adapters"):
        client.upload("two", {"x": b""})
    assert client.register("one", make_adapter(folder="new", seed=1)).adapter.version == 2
    served.connect(token_of("root")).register("team-b/one", folder)


def test_bytes_are_known_after_the_fetch(serve_with, make_adapter, tmp_path, refused):
    folders = [make_adapter(folder=f"f{i}", seed=i) for i in range(3)]
    size_bytes = (folders[0] / "adapter_model.safetensors").stat().st_size
    client = serve_with(f"[tenants.team-a]\nmax_bytes = {2 * size_bytes - 1}").connect(
        token_of("a")
    )
    digest = client.register("one", folders[0]).adapter.digest
    with refused("RESOURCE_EXHAUSTED", "max_bytes", f"stores {size_bytes} bytes"):
        client.register("two", folders[1])
    with refused("NOT_FOUND"):
        client.get("two")
    client.register("two", folders[0])
    assert client.register("two", folders[0], expected_digest=digest).adapter.version == 1


def test_a_tenant_without_bytes_left_costs_no_fetch(serve_with, make_adapter, tmp_path, refused):
    folder = make_adapter()
    size_bytes = (folder / "adapter_model.safetensors").stat().st_size
    client = serve_with(f"[tenants.team-a]\nmax_bytes = {size_bytes}").connect(token_of("a"))
    digest = client.register("one", folder).adapter.digest
    with refused("RESOURCE_EXHAUSTED", "max_bytes"):
        client.register("two", tmp_path / "nowhere")
    assert client.register("two", folder, expected_digest=digest).adapter.version == 1


def test_rate_limit_has_a_retry_time(serve_with, make_adapter, tmp_path, refused):
    client = serve_with("[tenants.'*']\nregistrations_per_minute = 2").connect(token_of("a"))
    folder = make_adapter()
    client.register("one", folder)
    with refused("NOT_FOUND"):
        client.register("two", tmp_path / "nowhere")  # what fails counts, too
    with refused("RESOURCE_EXHAUSTED", "registrations_per_minute") as refusal:
        client.register("one", folder)
    found = details(refusal.error)
    assert found["QuotaFailure"].violations[0].subject == "registrations_per_minute"
    assert 0 < found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() <= 30
    assert client.get("one").version == 1  # reading is not limited


def test_what_is_not_allowed_takes_nothing_from_the_rate(serve_with, make_adapter, refused):
    served = serve_with("[tenants.'*']\nregistrations_per_minute = 1")
    client = served.connect(token_of("a"))
    for _ in range(3):
        with refused("PERMISSION_DENIED"):
            client.register("team-b/one", make_adapter)
    folder = make_adapter()
    client.register("one", folder)
    served.connect(token_of("root")).register("team-b/one", folder)


def test_adapters_hold_under_concurrency(serve_with, make_adapter):
    served = serve_with("[tenants.team-a]\nmax_adapters = 5", fetch_workers=8)
    clients = [served.connect(token_of("a")) for _ in range(8)]
    folder = make_adapter()
    codes: list[str] = []
    start = threading.Barrier(8)

    def work(worker: int) -> None:
        start.wait()
        for i in range(3):
            try:
                clients[worker].register(f"n{worker}-{i}", folder)
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == ["OK"] * 5 + ["RESOURCE_EXHAUSTED"] * 19


def test_a_tenant_keeps_so_many_versions(serve_with, make_adapter):
    served = serve_with('[tenants."*"]\nmax_versions = 2')
    client = served.connect(token_of("a"))
    folders = [make_adapter(folder=f"f{seed}", seed=seed) for seed in range(4)]
    made = [client.register("one", folder) for folder in folders[:3]]
    assert [list(each.deleted_versions) for each in made] == [[], [], [1]]
    assert client.register("one", folders[3], keep=9).deleted_versions == [2]
