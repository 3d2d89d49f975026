"""The store as a process."""

from __future__ import annotations

import json
import os

from tests.support import forks
from tests.support.store.catalogs import make_data_folder
from tests.support.wait import TIMEOUT_S, until


class Process:
    """The store as a process with the flags of an operator. `log` is all that it writes."""

    def __init__(self, tmp_path, *arguments: str, volume=None, **environment: str) -> None:
        self.ready_file = tmp_path / "ready.json"
        self.ready_file.unlink(missing_ok=True)
        self.log = tmp_path / "store.log"
        self.log.unlink(missing_ok=True)
        data = tmp_path / "data"
        if volume is None:
            make_data_folder(data)
        flags = [
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--data-dir", str(data), "--source-roots", str(tmp_path)),
            *("--ready-file", str(self.ready_file), "--log-format", "json"),
        ]
        self.process = forks.start(
            "adapter_store", [*flags, *arguments], self.log, environment, volume
        )

    def wait_until_ready(self) -> dict[str, str]:
        until(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return json.loads(self.ready_file.read_text())

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, number: int) -> tuple[int, str]:
        """Signals, waits; gives the exit status and the log."""
        self.signal(number)
        return self.process.wait(TIMEOUT_S), self.log.read_text()
