"""What an address stands for."""

from __future__ import annotations

import socket
import threading

import pytest

from loadout._routing import addresses
from loadout._routing.addresses import Resolver, is_name, resolve, split
from loadout._routing.replicas import Endpoint
from loadout.errors import InvalidArgument


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("a:1", ["a:1"]),
        ("a:1, b:1,a:1", ["a:1", "b:1"]),
        (["a:1", "b:1"], ["a:1", "b:1"]),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", ["ipv4:127.0.0.1:1,127.0.0.2:1"]),
        ("unix:/run/loadout", ["unix:/run/loadout"]),
        ("dns:///replicas", ["dns:///replicas"]),
        ("[::1]:1", ["[::1]:1"]),
    ],
)
def test_addresses_are_split(given, targets):
    assert split("inference", given) == targets


@pytest.mark.parametrize("given", ["a:1,,b:1", " ", ["a:1", ""]])
def test_an_empty_address_is_refused(given):
    with pytest.raises(InvalidArgument, match="inference") as caught:
        split("inference", given)
    assert caught.value.subject == "inference"


@pytest.mark.parametrize("given", ["localhost", "a:1,replicas.example", "127.0.0.1", "[::1]"])
def test_an_address_without_a_port_is_refused(given):
    host = given.split(",")[-1]
    with pytest.raises(InvalidArgument) as caught:
        split("store", given)
    assert str(caught.value) == f"store: {host} has no port; give HOST:PORT, such as {host}:7070"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("inference.example:7080", True),
        ("127.0.0.1:7080", False),
        ("[::1]:7080", False),
        ("localhost:7080", False),
        ("unix:/run/x", False),
        ("dns:///inference.example:7080", False),
        ("inference.example", False),
    ],
)
def test_which_targets_are_names(target, expected):
    assert is_name(target) is expected


def stands_for(monkeypatch, *ips):
    monkeypatch.setattr(addresses, "lookup", lambda host, port: list(ips))


def test_a_name_stands_for_its_addresses_of_one_family(monkeypatch):
    stands_for(monkeypatch, "10.0.0.2", "::2", "10.0.0.1", "::1", "10.0.0.1")
    assert resolve("replicas:7080") == [
        Endpoint("10.0.0.1:7080", "replicas"),
        Endpoint("10.0.0.2:7080", "replicas"),
    ]
    stands_for(monkeypatch, "::2", "::1")
    assert [each.address for each in resolve("replicas:7080")] == ["[::1]:7080", "[::2]:7080"]


def test_a_name_with_one_address_is_left_to_grpc(monkeypatch):
    stands_for(monkeypatch, "10.0.0.2", "::2")
    assert resolve("replicas:7080") == [Endpoint("replicas:7080", ip="10.0.0.2")]


def test_the_system_resolves_this_machine():
    assert set(addresses.lookup("localhost", "80")) <= {"127.0.0.1", "::1"}


def test_a_resolver_tells_changes_and_survives_failures(monkeypatch):
    now_s = 0.0
    stands_for(monkeypatch, "10.0.0.1", "10.0.0.2")
    found = []
    updated = threading.Semaphore(0)

    def change(endpoints):
        found.append([each.address for each in endpoints])
        updated.release()

    resolver = Resolver("replicas:1", change, lambda: now_s)
    resolver.first.result(60)
    resolver.refresh()  # too early
    assert found == [["10.0.0.1:1", "10.0.0.2:1"]]

    def fail(host, port):
        updated.release()
        raise socket.gaierror("no such name")

    assert updated.acquire(timeout=60)
    monkeypatch.setattr(addresses, "lookup", fail)
    now_s += addresses.RESOLVE_S
    resolver.refresh()
    assert updated.acquire(timeout=60)
    stands_for(monkeypatch, "10.0.0.3", "10.0.0.2")
    while len(found) < 2:
        now_s += addresses.RESOLVE_S
        resolver.refresh()
        updated.acquire(timeout=0.1)
    assert found[-1] == ["10.0.0.2:1", "10.0.0.3:1"]


def test_the_first_time_ends_also_if_the_name_is_unknown(monkeypatch):
    def fail(host, port):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(addresses, "lookup", fail)
    Resolver("replicas:1", lambda endpoints: pytest.fail("nothing was found")).first.result(60)


@pytest.mark.parametrize("address", ["http://us3r:s3cr3t@host:7070", "https://us3r:s3/cr3t@host,"])
def test_a_password_of_a_web_address_is_in_no_error(address):
    with pytest.raises(InvalidArgument, match="host") as caught:
        split("store", address)
    assert "cr3t" not in str(caught.value)
