"""Runs both services on the device and loads them over gRPC: times and rates as a user sees
them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.gpu_run.context import Context, Found
from bench.gpu_run.services import folder
from bench.gpu_run.services.figures import table
from bench.gpu_run.services.plan import Plan, rounds_of

PROGRAM = "bench.gpu_run.services.program"
LAST_S, STOP_S, KILL_S = 16.0, 10.0, 2.0
"""Time before the deadline at which the last round should end, at which the program is asked to
end, and at which it is killed."""
OUTPUT_CHARACTERS = 4000
DEVICE_FLAGS = ("--device", "cuda", "--max-model-len", "8192")
EMULATED_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--num-threads", "1"),
    *("--max-model-len", "128", "--max-batch-tokens", "64"),
)
VARIABLES = {"LOADOUT_INFERENCE_NATIVE_KERNELS": "false"}
"""The emulated services compute with torch: Triton's interpreter, and a build of the kernels for
CPUs, would take minutes."""


def run(context: Context) -> Found:
    """Runs the stage. Raises Missing for packages that the services lack, and AssertionError if the
    program fails, leaves rounds out, or registers no shared image with the device."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name, "home")
        wheels = folder.make(context.pack, home)
        plan = Path(name, "plan.json")
        make_plan(context, time.monotonic() + context.deadline.left_s - LAST_S).write(plan)
        found, status, output = run_program(context, home, plan, {"wheels": wheels})
    print(table(found), flush=True)
    assert status == 0, f"the program ended with {status}: {output}"
    assert "rounds" in found, f"the program was not in time: {output}"
    assert not found["left_out"], f"no time was left for {found['left_out']}"
    if not context.is_emulated:
        check_registered(found["registered_images"])
    return found


def check_registered(results: dict[str, float]) -> None:
    """Checks that the device has copied images from where the store has them. Raises
    AssertionError."""
    assert results.get("registered"), f"no shared image was registered with the device: {results}"


def make_plan(context: Context, end_s: float) -> Plan:
    sizes, services = context.sizes, context.sizes.services
    flags = ["--no-tokenizer", "--no-prefix-cache", "--no-prefetch"]
    flags += ["--max-loras", str(max(8, 2 * services.adapters)), "--max-rank", "64"]
    flags += ["--kv-memory", str(services.kv_bytes)]
    flags += ["--adapter-memory", str(services.adapter_bytes)]
    flags += ["--host-memory", str(services.host_bytes)]
    flags += EMULATED_FLAGS if context.is_emulated else DEVICE_FLAGS
    return Plan(
        config=sizes.config,
        dtype=str(sizes.dtype).removeprefix("torch."),
        rank=sizes.rank,
        device=str(context.device),
        num_adapters=services.adapters,
        inference_flags=tuple(flags),
        rounds=rounds_of(services),
        end_s=end_s,
    )


def run_program(context: Context, home: Path, plan: Path, facts: Found) -> tuple[Found, int, str]:
    """Runs the program in `home`, and saves each of its results with `facts`. Returns the last, the
    exit status, and the end of its messages."""
    log, found = plan.with_suffix(".log"), facts
    path = os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        log.open("wb") as messages,
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(plan)],
            cwd=home,
            env=os.environ | VARIABLES | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        left_s = context.deadline.left_s
        timers = [
            threading.Timer(left_s - STOP_S, process.stdin.close),
            threading.Timer(left_s - KILL_S, kill_session, [process.pid]),
        ]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            for line in process.stdout:
                found = facts | json.loads(line)
                context.save(found)
            status = process.wait()
        finally:
            for timer in timers:
                timer.cancel()
    return found, status, log.read_text(errors="replace")[-OUTPUT_CHARACTERS:]


def kill_session(leader: int) -> None:
    """Kills a process and all processes of its session, such as services in their own groups."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile
            continue
