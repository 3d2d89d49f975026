"""Replaces the program `loadout` in shells, and has a fork run the command.

It imports little, so it starts at once. The fork gets its streams, folder, environment and signals,
and it ends with the fork's exit status. See `forks.programs`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(address: str, module: str, arguments: list[str]) -> int:
    """Returns the exit status; 128 and the signal's number if a signal ended the fork, as shells
    do."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"f"], (0, 1, 2))
        request = {
            "module": module,
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "max_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        body = json.dumps(request).encode()
        connection.sendall(len(body).to_bytes(4, "big") + body)
        pid = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        for number in ENDS:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        status = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big", signed=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
