"""`python -m fuzz.worker TARGET [libFuzzer options] [corpus folders]` fuzzes one target.

Coverage guides the fuzzer: the import instruments all our packages and the TOML and JSON readers.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(
    include=["adapter_store", "contract", "servicekit", "inference_svc", "json", "tomllib"]
):
    from fuzz.mutations import mutate
    from fuzz.refusals import TALLY
    from fuzz.targets import TARGETS


PAGE_BYTES = resource.getpagesize()
FIRST_SAMPLE, SAMPLE_EVERY = 100, 1000
OF_FORM = 3
"""One of this many changes is the fuzzer's own change of bytes; the others keep an input's form."""


class Watched:
    """A target that regularly prints the process's resident memory, and the number of executions so
    far in which a reader accepted its input."""

    def __init__(self, target: Callable[[bytes], None]) -> None:
        self._target = target
        self._executions = self._accepted = 0

    def __call__(self, data: bytes) -> None:
        self._executions += 1
        if self._executions == FIRST_SAMPLE or self._executions % SAMPLE_EVERY == 0:
            with open("/proc/self/statm") as file:
                resident_bytes = int(file.read().split()[1]) * PAGE_BYTES
            line = f"resident: {resident_bytes >> 10} KiB, accepted: {self._accepted}\n"
            os.write(2, line.encode())
        before = TALLY.accepted
        self._target(data)
        self._accepted += TALLY.accepted > before


def main() -> None:
    name = sys.argv.pop(1)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        changed = mutate(name, data, seed) if seed % OF_FORM else None
        if changed is None or len(changed) > max_size:
            changed = atheris.Mutate(data, len(data) if len(data) > max_size else max_size)
        return changed

    atheris.Setup(sys.argv, Watched(TARGETS[name]), custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
