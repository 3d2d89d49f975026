"""Starts both services, loads them, and prints the results so far as JSON, a line each time.

    python -m bench.gpu_run.services.program PLAN

PLAN is the file of a `Plan`. The program runs in the folder that `folder` makes, and ends, with the
services, when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu_run.context import Found
from bench.gpu_run.services.checkpoints import BASE_MODEL, Checkpoints
from bench.gpu_run.services.figures import row_of
from bench.gpu_run.services.plan import Plan
from bench.gpu_run.services.streams import run_round
from bench.gpu_run.timing import Deadline
from loadout import AsyncClient, Client
from loadout.demo.system import System, SystemSettings
from loadout.errors import NotFound, Unavailable
from loadout.prometheus import scrape
from loadout.types import ImageState

IN_MEMORY = Path("/dev/shm")
POLL_S = 0.02
ROUND_S = 8.0
"""Time that must be left for a round."""
FEW = [5, 6, 7]
"""A prompt."""


def main() -> None:
    plan = Plan.read(Path(sys.argv[1]))
    threading.Thread(target=_end_with_input, daemon=True).start()
    device = torch.device(plan.device)
    made = Checkpoints(plan.config, getattr(torch, plan.dtype), plan.rank, device)
    # The store keeps two copies of each adapter, its files and its image.
    num_bytes = made.model_bytes + 3 * plan.num_adapters * made.adapter_bytes
    with tempfile.TemporaryDirectory(dir=place_for(num_bytes)) as folder:
        measure(plan, made, Path(folder))


def place_for(num_bytes: int) -> Path:
    """Returns memory's file system if it has room for twice as much, or else the default folder of
    temporary files."""
    has_room = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 2 * num_bytes
    return IN_MEMORY if has_room else Path(tempfile.gettempdir())


def _end_with_input() -> None:
    """Interrupts the program when the stage ends, however it does."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)


def measure(plan: Plan, made: Checkpoints, folder: Path) -> None:
    """Measures everything of the plan."""
    found: Found = {"adapter_bytes": made.adapter_bytes, "model_bytes": made.model_bytes}
    deadline = Deadline(plan.end_s - time.monotonic())
    began_s = time.monotonic()
    made.write_model(folder / "model")
    names = [f"adapter-{index}" for index in range(plan.num_adapters)]
    for name in names:
        made.write_adapter(folder / "adapters" / name)
    if made.device.type == "cuda":
        torch.cuda.empty_cache()
    found["write_s"] = time.monotonic() - began_s
    say(found)
    settings = SystemSettings(
        folder / "model",
        BASE_MODEL,
        source_roots=(folder,),
        store_flags=("--log-level", "warning"),
        inference_flags=("--log-level", "warning", *plan.inference_flags),
    )
    began_s = time.monotonic()
    with System(settings, folder / "system") as system:
        at = system.addresses
        with Client(inference=at.inference, store=at.store, timeout_s=None) as client:
            wait_for_a_token(client, system)
            found["start_s"] = time.monotonic() - began_s
            found["kernels"] = client.server_info().kernels
            say(found)
            revision = register(client, folder / "adapters", names, found)
            found["registered_images"] = registered_images(at.inference_metrics)
            say(found)
        asyncio.run(run_rounds(plan, system, names, revision, found, deadline))
        if made.device.type == "cuda":
            free_bytes, all_bytes = torch.cuda.mem_get_info()
            found["device_used_bytes"] = all_bytes - free_bytes
            say(found)


def wait_for_a_token(client: Client, system: System) -> None:
    """Waits for the first token, while the model is loaded. Raises ProcessFailed if a service ends
    before."""
    while True:
        system.check_alive()
        with suppress(Unavailable):
            client.complete(FEW, max_tokens=1, temperature=0.0, ignore_eos=True)
            return
        time.sleep(POLL_S)


def register(client: Client, folder: Path, names: list[str], found: Found) -> int:
    """Registers the adapters, waits until they are compiled, and times the first token of one that
    is only in the store. Returns the last revision."""
    began_s = time.monotonic()
    revision = 0
    for name in names:
        source = f"file://{(folder / name).resolve()}"
        revision = client.register(name, source, base_model=BASE_MODEL).revision
    found["register_s"] = time.monotonic() - began_s
    while not all(is_compiled(client, name) for name in names):
        time.sleep(POLL_S)
    found["compiled_s"] = time.monotonic() - began_s
    began_s = time.monotonic()
    chunks = client.generate(
        FEW, adapter=names[0], min_revision=revision, max_tokens=1, ignore_eos=True
    )
    next(chunk for chunk in chunks if chunk.token_ids)
    found["cold_first_token_s"] = time.monotonic() - began_s
    return revision


def registered_images(metrics_address: str) -> dict[str, float]:
    """Returns the fates of the images that the store has shared with the device's server."""
    samples = scrape(metrics_address).select("loadout_inference_registered_images_total")
    return {sample.labels["result"]: sample.value for sample in samples}


def is_compiled(client: Client, name: str) -> bool:
    states = client.get(name).layout_states
    return bool(states) and all(each.state is ImageState.READY for each in states)


async def run_rounds(
    plan: Plan,
    system: System,
    names: list[str],
    revision: int,
    found: Found,
    deadline: Deadline,
) -> None:
    """Runs the plan's rounds until the deadline. Before the first of each size, rounds without and
    with an adapter, of which nothing is noted, warm up."""
    at, vocab_size = system.addresses, plan.config["vocab_size"]
    found |= {"rounds": [], "left_out": []}
    warm: set[tuple[int, int]] = set()
    async with AsyncClient(inference=at.inference, store=at.store, timeout_s=None) as client:
        for wanted in plan.rounds:
            if deadline.is_near(ROUND_S):
                found["left_out"].append(asdict(wanted))
                continue
            chosen = names[: wanted.adapters]
            size = (wanted.streams, wanted.prompt_tokens)
            if size not in warm:
                warm.add(size)
                for few in ([], names[:1]):
                    await run_round(client, wanted, few, revision, vocab_size)
            if wanted.is_cold:
                for resident in await client.residents():
                    with suppress(NotFound):  # it is in the host's memory alone
                        await client.unload(resident.digest)
            streams = await run_round(client, wanted, chosen, revision, vocab_size)
            found["rounds"].append(row_of(wanted, streams, found["rounds"]))
            say(found)


def say(found: Found) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted, because the stage's time was over")
