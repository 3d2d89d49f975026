"""One rank of a push of sharded tensors: `python -m tests.loadout.push.sharded_rank`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from loadout import AsyncClient, Client
from loadout.errors import LoadoutError
from tests.support.loadout.tensors import CONFIG, A, B

NUM_RANKS = 2


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {A: torch.randn(2, 5), B: torch.randn(7, 2)}


class Unreadable:
    """A config that fails with an error of its own."""

    def to_dict(self) -> dict[str, Any]:
        raise RuntimeError("no such field")


def push(
    store: str, client: str, tensors: dict[str, torch.Tensor], config: object, group: object
) -> str:
    async def push_async() -> str:
        async with AsyncClient(store=store) as made:
            return (await made.push("a", tensors, config, group=group)).digest

    if client == "async":
        return asyncio.run(push_async())
    with Client(store=store) as made:
        return made.push("a", tensors, config, group=group).digest


def outcome_of(store: str, client: str, own_fault: str, fault: str) -> str:
    """Pushes once. Returns the digest, or the error; `own_fault` is what this rank does wrong."""
    config: object = CONFIG
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    placements = {A: [Shard(1)], B: [Shard(0)]}
    tensors = {
        name: distribute_tensor(values, mesh, placements[name]) for name, values in whole().items()
    }
    if own_fault == "missing":
        del tensors[B]
    if own_fault == "dtype":
        tensors[A] = tensors[A].to(torch.int32)
    if own_fault == "config":
        config = Unreadable()
    if own_fault == "empty":
        tensors.clear()
    group = distributed.group.WORLD if fault == "empty" else None
    try:
        return push(store, client, tensors, config, group)
    except LoadoutError as error:
        return f"{type(error).__name__}: {error.message}"


def main() -> None:
    rank, rendezvous, store, *pushes = sys.argv[1:]
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=NUM_RANKS
    )
    outcomes = []
    for client, fault in map(str.split, pushes):
        outcomes.append(outcome_of(store, client, fault if rank == "1" else "", fault))
    print(json.dumps(outcomes), flush=True)
    distributed.barrier()  # gloo does not like a rank that leaves while another still reads
    # Without torch's end, which now and then aborts a process that has done its work.
    os._exit(0)


if __name__ == "__main__":
    main()
