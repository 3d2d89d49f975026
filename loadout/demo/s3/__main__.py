"""`python -m loadout.demo.s3 READY_FILE`: serves S3 on a free port until SIGTERM.

READY_FILE is written once serving: {"url": "http://host:port"}.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from moto.server import ThreadedMotoServer


def main(ready_file: Path) -> None:
    stops = {signal.SIGTERM, signal.SIGINT}
    # Blocked before the server's threads exist, so that only sigwait sees them.
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    unfinished = ready_file.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"url": f"http://{host}:{port}"}))
    unfinished.rename(ready_file)
    signal.sigwait(stops)
    server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
