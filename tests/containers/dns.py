"""The cluster's DNS: Services' names, as dnsmasq on the pods' network answers them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

SUBNET = "10.119.0.0/24"
GATEWAY = "10.119.0.1"
"""This machine on the pods' network."""
MACHINE = "machine.test"
"""Another name of it, for pods."""
DOMAIN = "svc.cluster.local"


class Dns:
    """Answers `NAME.NAMESPACE.svc.cluster.local` with the addresses that it was last given.
    `resolv_conf` is the file for pods."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self._namespace = namespace
        self._hosts = folder / "hosts"
        self._hosts.write_text("")
        self.resolv_conf = folder / "resolv.conf"
        search = f"{namespace}.{DOMAIN} {DOMAIN} cluster.local"
        lines = (f"nameserver {GATEWAY}", f"search {search}", "options ndots:5", "")
        self.resolv_conf.write_text("\n".join(lines))
        command = [
            *("dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--local-ttl=1"),
            *(f"--addn-hosts={self._hosts}", f"--listen-address={GATEWAY}", "--bind-dynamic"),
            *("--conf-file=/dev/null", "--pid-file=", "--user=root", "--local=/cluster.local/"),
            f"--address=/{MACHINE}/{GATEWAY}",
        ]
        # A SIGHUP must not end it before it handles them.
        self._process = subprocess.Popen(["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *command])

    def publish(self, services: Mapping[str, Iterable[str]]) -> None:
        """Replaces all names' addresses."""
        lines = [
            f"{address} {name}.{self._namespace}.{DOMAIN}"
            for name, addresses in services.items()
            for address in addresses
        ]
        self._hosts.write_text("\n".join([*lines, ""]))
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
