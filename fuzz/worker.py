"""`python -m fuzz.worker TARGET [libFuzzer options] [corpus folders]`: one target, in this process.

Coverage guides it: everything of ours, and the TOML and JSON readers, is instrumented on import.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(
    include=["adapter_store", "servicekit", "inference_svc", "json", "tomllib"]
):
    from fuzz.targets import TARGETS


PAGE_BYTES = resource.getpagesize()
FIRST_SAMPLE, SAMPLE_EVERY = 100, 1000


class Watched:
    """A target, telling the process's resident memory now and then."""

    def __init__(self, target: Callable[[bytes], None]) -> None:
        self._target = target
        self._executions = 0

    def __call__(self, data: bytes) -> None:
        self._executions += 1
        if self._executions == FIRST_SAMPLE or self._executions % SAMPLE_EVERY == 0:
            with open("/proc/self/statm") as file:
                resident_bytes = int(file.read().split()[1]) * PAGE_BYTES
            os.write(2, b"resident: %d KiB\n" % (resident_bytes >> 10))
        self._target(data)


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, Watched(TARGETS[name]))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
