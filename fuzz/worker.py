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
    include=["adapter_store", "contract", "servicekit", "inference_svc", "json", "tomllib"]
):
    from fuzz.mutations import mutate
    from fuzz.refusals import TALLY
    from fuzz.targets import TARGETS


PAGE_BYTES = resource.getpagesize()
FIRST_SAMPLE, SAMPLE_EVERY = 100, 1000
OF_FORM = 3
"""One in so many changes is of bytes, as the fuzzer makes them; the others keep an input's form."""


class Watched:
    """A target, telling now and then the process's resident memory, and in how many executions so
    far a reader has accepted what it was given."""

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
