"""Which ports of which hosts a place in the cluster reaches: run there, `python reach.py HOST:PORT
...` prints those that it does, one a line. A port that nobody listens on counts, as far as the
network goes."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_S = 10.0


def reaches(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    with ThreadPoolExecutor() as threads:
        found = threads.map(reaches, sys.argv[1:])
        print(*(each for each, is_open in zip(sys.argv[1:], found, strict=True) if is_open))
