"""Checks that a service can listen, before it spends time on anything else."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection

from servicekit.settings.addresses import split_address
from servicekit.settings.describe import describe
from servicekit.settings.service import ServiceSettings

_LISTENS = "HOST:PORT"
"""The form of settings that name an address of the service's own."""


def check_ports(settings: ServiceSettings, names: Collection[str] | None = None) -> None:
    """Raises OSError naming the flag of an address at which the service cannot listen now, or that
    another of its own has too; of the settings of these names, or of all."""
    taken: dict[str, str] = {}
    for setting in describe(type(settings)):
        address = getattr(settings, setting.name)
        is_checked = names is None or setting.name in names
        if setting.metavar != _LISTENS or not address or not is_checked:
            continue
        if address in taken and split_address(address)[1]:
            raise OSError(f"{setting.flag}: {address} is also the address of {taken[address]}")
        taken[address] = setting.flag
        _check(setting.flag, address)


def _check(flag: str, address: str) -> None:
    host, port = split_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "it is already in use; stop the program that uses it, or choose another port"
        raise OSError(f"{flag}: cannot listen on {address}: {why}") from None
