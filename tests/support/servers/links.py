"""A second machine, as far as the network goes: a namespace of its own behind a link that can be
cut."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOCAL = "127.0.0.2"
_HOLD = "import sys; print(flush=True); sys.stdin.read()"


@dataclass
class Link:
    """`leader` is this machine's address at the link. Commands behind `prefix` run on the other
    machine. Where this process may make no namespace, both are one machine, which is never cut."""

    leader: str
    prefix: tuple[str, ...] = ()
    device: str = ""

    @property
    def can_be_cut(self) -> bool:
        return bool(self.device)

    def cut(self) -> None:
        """Has the network lose all packets."""
        _run("ip", "link", "set", self.device, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", self.device, "up")


@contextmanager
def second_machine() -> Iterator[Link]:
    """Yields the link to a second machine, which ends with the context."""
    hold = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with hold:
        assert hold.stdout is not None
        is_there = hold.stdout.readline() == b"\n"
        yield (_join(hold.pid) if is_there else None) or Link(LOCAL)


def _join(pid: int) -> Link | None:
    """Returns the link to the namespace of a process; None where it may not be made."""
    device, theirs = f"test-{pid}", f"test-{pid}b"
    # Of the networks for tests of devices, RFC 2544.
    ours, other = (f"198.18.{pid // 64 % 256}.{pid % 64 * 4 + n}" for n in (1, 2))
    prefix = ("nsenter", "--target", str(pid), "--net")
    try:
        _run("ip", "link", "add", device, "type", "veth", "peer", theirs, "netns", str(pid))
        _run("ip", "address", "add", f"{ours}/30", "dev", device)
        _run("ip", "link", "set", device, "up")
        _run(*prefix, "ip", "address", "add", f"{other}/30", "dev", theirs)
        _run(*prefix, "ip", "link", "set", theirs, "up")
        _run(*prefix, "ip", "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError):
        return None
    return Link(ours, prefix, device)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
