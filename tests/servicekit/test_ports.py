"""A port that is taken shows before anything else is done."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store.config import StoreSettings
from inference_svc.config import InferenceSettings
from servicekit.settings.ports import check_ports
from servicekit.settings.service import ServiceSettings

ANY = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def settings(folder: Path, **addresses: str) -> list[ServiceSettings]:
    (folder / "config.json").write_text("{}")
    inference = InferenceSettings(model=folder, **{**ANY, **addresses})  # type: ignore[arg-type]
    if "http" in addresses:
        return [inference]
    return [StoreSettings(**{**ANY, **addresses}), inference]  # type: ignore[arg-type]


def test_free_ports(tmp_path: Path) -> None:
    for each in settings(tmp_path):
        check_ports(each)
    for each in settings(tmp_path, http="localhost:0"):
        check_ports(each)


def test_ports_that_are_not_used(tmp_path: Path, taken: str) -> None:
    """Of a program that is not to listen at all of its addresses."""
    for each in settings(tmp_path, listen=taken):
        check_ports(each, ("metrics_listen",))
        with pytest.raises(OSError, match="--listen"):
            check_ports(each, ("listen",))


@pytest.mark.parametrize("name", ["listen", "metrics_listen", "http"])
def test_a_port_in_use(tmp_path: Path, taken: str, name: str) -> None:
    for each in settings(tmp_path, **{name: taken}):
        with pytest.raises(OSError) as caught:
            check_ports(each)
        assert str(caught.value) == (
            f"--{name.replace('_', '-')}: cannot listen on {taken}: it is already in use; stop "
            "the program that uses it, or choose another port"
        )


def test_two_addresses_of_ours_that_are_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    for each in settings(tmp_path, listen=free, http=free):
        with pytest.raises(OSError, match=rf"^--[a-z-]+: {free} is also the address of --[a-z-]+$"):
            check_ports(each)


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    for each in settings(tmp_path, listen="192.0.2.1:1"):
        with pytest.raises(OSError, match=r"^--listen: cannot listen on 192\.0\.2\.1:1: Cannot"):
            check_ports(each)


def test_a_store_elsewhere_is_no_address_of_ours(tmp_path: Path, taken: str) -> None:
    for each in settings(tmp_path, http="127.0.0.1:0", store=taken):
        check_ports(each)
