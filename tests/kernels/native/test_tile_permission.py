"""The system's permission for AMX's tile registers: asked for, and done without if refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels.native import build
from kernels.native.tile_permission import REFUSED, request_tiles

SANDBOXED = """
import ctypes, logging, struct
from kernels.native.library import choose
from kernels.native.tile_permission import REFUSED, request_tiles

logging.basicConfig(level=logging.INFO)
# A filter of system calls, in Berkeley's packet filter: arch_prctl, number 158, may not ask for a
# feature, 0x1023. Each step is its code, steps to skip if it is true and if not, a value.
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, NO_PERMISSION = 0x7FFF0000, 0x00050001
NUMBER, FIRST_ARGUMENT = 0, 16
steps = [
    *[(LOAD, 0, 0, NUMBER), (EQUAL, 0, 3, 158), (LOAD, 0, 0, FIRST_ARGUMENT)],
    *[(EQUAL, 0, 1, 0x1023), (RETURN, 0, 0, NO_PERMISSION), (RETURN, 0, 0, ALLOW)],
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
assert prctl(22, 2, ctypes.c_void_p(ctypes.addressof(filter)), 0, 0) == 0, "seccomp"
try:
    request_tiles()
except OSError as error:
    print("refused:", error)
found = choose(None)
print("serves:", found.library and found.library.variant)
print("faults:", *found.faults)
"""


@pytest.mark.processes
def test_a_system_that_refuses_them_gets_the_next_best_kernels() -> None:
    """The first request of a process is refused, in a sandbox of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SANDBOXED], capture_output=True, text=True, timeout=300, check=True
    )
    assert f"refused: {REFUSED}: Operation not permitted" in done.stdout, done.stdout + done.stderr
    others = [each for each in build.runnable_variants() if each not in build.TILE_VARIANTS]
    if others and build.find_compiler():
        assert f"serves: {others[0]}" in done.stdout
    for variant in build.TILE_VARIANTS & {*build.runnable_variants()}:
        assert f"{variant}: {REFUSED}" in done.stdout
        assert f"the native kernels for {variant} cannot be used: {REFUSED}" in done.stderr


def test_a_processor_without_them_gives_no_permission() -> None:
    if "amx_tile" in build.processor_flags():
        request_tiles()  # once more, as every library does
    else:
        with pytest.raises(OSError, match=REFUSED):
            request_tiles()
