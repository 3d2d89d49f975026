"""Checks and times the exchanges of ranks on their devices, and compares their tokens with a CPU's.

With one device, it checks a group of one rank: NCCL, and sums that a graph has recorded. The rest
needs two devices.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from torch import Tensor

from bench.gpu_run.context import Context, Found
from bench.gpu_run.emulation import EmulatedMeeting
from bench.gpu_run.pack.store import engine_config, generate, make_store, read_recorded
from bench.gpu_run.stages.parity import MIN_SHARE, compare, store_of_child
from inference_svc.backends.cuda.exchange import DeviceExchange, DeviceMeeting
from inference_svc.backends.cuda.graphs import CudaRecorder, Recorded
from inference_svc.backends.exchange import ExchangeFailed
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.model.description import Rank

MAX_RANKS = 8
TIMEOUT_S, DEATH_S = 60.0, 20.0
"""How long a rank may take, and how long rank 0 may wait for one that has ended."""
SUM_BYTES = {"decode of 1 row": 8 << 10, "of 32 rows": 256 << 10, "prompt of 2048": 16 << 20}
"""Sums of a layer of an 8B, in bf16."""
NUM_SUMS, NUM_REPLAYS = 64, 20
NEEDS_TWO = "needs two devices, and there is one"


def run(context: Context) -> Found:
    """Runs the stage. Raises AssertionError for wrong sums or tokens, and the error of a rank."""
    count = 2 if context.is_emulated else min(MAX_RANKS, torch.cuda.device_count())
    found: Found = {"devices": count}
    found |= exchange(context, count)
    found["stages"] = exchange(context, 2, num_stages=2) if count > 1 else NEEDS_TWO
    context.save(found)
    if context.is_emulated:
        return found | {"tokens": "not emulated"}
    if count == 1:
        return found | {"tokens": NEEDS_TWO}
    found["tokens"] = tokens(context, tensor_parallel=2)
    context.save(found)
    return found | {"tokens of stages": tokens(context, pipeline_parallel=2)}


def exchange(context: Context, count: int, num_stages: int = 1) -> Found:
    """Returns rank 0's results of ranks that exchange, each in a process of its own, within a
    stage, or from one to the other of two."""
    make = EmulatedMeeting if context.is_emulated else DeviceMeeting
    meeting = make(count, TIMEOUT_S, num_stages=num_stages)
    processes = multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    ranks = [
        processes.Process(
            target=_compute,
            args=(Rank(index, count), meeting, sender, context.is_emulated, num_stages),
        )
        for index in range(count)
    ]
    for each in ranks:
        each.start()
    sender.close()
    try:
        assert receiver.poll(TIMEOUT_S + DEATH_S), "rank 0 does not answer"
        found: Found | str = receiver.recv()
    finally:
        for each in ranks:
            each.kill()
            each.join()
        meeting.close()
    assert isinstance(found, dict), found
    return found


def _compute(
    rank: Rank, meeting: DeviceMeeting, sender: Connection, is_emulated: bool, num_stages: int
) -> NoReturn:
    """Runs one rank; rank 0 sends its results, another one its error."""
    found: Found | str
    try:
        if not is_emulated:
            torch.cuda.set_device(rank.index)
        own = meeting.join(rank)
        check = _check if num_stages == 1 else _check_stages
        found = {"exchange": own.name, **check(rank, own, meeting.device)}
        if not is_emulated and num_stages == 1:
            found["sum_us"] = {name: _time(own, size) for name, size in SUM_BYTES.items()}
            found["death"] = _lose(rank, own) if rank.count > 1 else NEEDS_TWO
    except Exception as error:
        found = f"rank {rank.index}: {type(error).__name__}: {error}"
    if rank.index == 0 or isinstance(found, str):
        sender.send(found)
    os._exit(0)  # the device may still compute


def _check(rank: Rank, own: DeviceExchange, device: torch.device) -> Found:
    """Checks sums and columns, computed and replayed from a recording."""
    x = torch.zeros(4, 8, device=device)
    expected = sum(range(1, rank.count + 1))
    side_by_side: list[Tensor] = []

    def compute() -> None:
        y = x + 1
        own.sum(y)
        x.copy_(y)
        side_by_side[:] = [own.side_by_side(y)]

    def check(name: str) -> None:
        own.wait()
        assert x.eq(expected).all(), f"{name}: {x[0, 0]} is not the sum {expected}"
        assert side_by_side[0].shape == (4, 8 * rank.count), name
        assert side_by_side[0].eq(expected).all(), f"{name}: columns"

    x.fill_(rank.index)
    compute()
    check("computed")
    if device.type == "cuda":
        recorded = CudaRecorder(own.wait)(compute)
        for _ in range(3):
            x.fill_(rank.index)
            recorded.replay()
            check("replayed")
    x.fill_(rank.index)
    own.broadcast(x)
    own.wait()
    assert x.eq(0).all(), f"{x[0, 0]} is not rank 0's"
    is_last = rank.index == rank.count - 1
    assert own.agree(True)
    assert not own.agree(not is_last)
    return {"is_recorded": device.type == "cuda"}


def _check_stages(rank: Rank, own: DeviceExchange, device: torch.device) -> Found:
    """Checks values that go to the second stage and come back doubled, computed and replayed."""
    x, back = torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device)

    def compute() -> None:
        if rank.index == 0:
            own.send(x, 1)
            own.receive(back, 1)
        else:
            own.receive(x, 0)
            own.send(x * 2, 0)

    def check(name: str, value: float) -> None:
        x.fill_(value if rank.index == 0 else 0.0)
        compute() if recorded is None else recorded.replay()
        own.wait()
        assert x.eq(value).all(), f"{name}: {x[0, 0]} is not {value}"
        assert rank.index > 0 or back.eq(2 * value).all(), name

    recorded: Recorded | None = None
    check("computed", 3.0)
    if device.type == "cuda":
        recorded = CudaRecorder(own.wait)(compute)
        for value in (4.0, 5.0):
            check("replayed", value)
    x.fill_(rank.index)
    own.broadcast_stages(x)
    own.wait()
    assert x.eq(0).all(), f"{x[0, 0]} is not rank 0's"
    assert not own.agree(rank.index == 0)
    return {"is_recorded": device.type == "cuda"}


def _time(own: DeviceExchange, num_bytes: int) -> float:
    """Returns the microseconds of a recorded sum, of as many as a model has. All ranks replay as
    often."""
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda")

    def compute() -> None:
        for _ in range(NUM_SUMS):
            own.sum(x)

    recorded, times = CudaRecorder(own.wait)(compute), []
    for _ in range(NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        recorded.replay()
        end.record()
        own.wait()
        times.append(begin.elapsed_time(end) * 1e3 / NUM_SUMS)
    return min(times)


def _lose(rank: Rank, own: DeviceExchange) -> Found:
    """Ends the last rank before a recorded sum; returns how long rank 0 takes to come back from it,
    once it knows."""
    x = torch.zeros(8, device="cuda")
    recorded = CudaRecorder(own.wait)(lambda: own.sum(x))
    own.agree(True)
    if rank.index == rank.count - 1:
        os._exit(0)
    recorded.replay()
    began_s = time.monotonic()
    try:
        own.wait(1.0)
    except ExchangeFailed:
        waited_s = time.monotonic() - began_s
    else:
        raise AssertionError("a sum has ended without its last rank")
    own.fail()
    event = torch.cuda.Event()
    event.record()
    while not event.query() and time.monotonic() - began_s < DEATH_S:
        time.sleep(0.01)
    ended_s = time.monotonic() - began_s - waited_s
    return {"waited_s": waited_s, "kernel_ended_s": ended_s if event.query() else None}


def tokens(context: Context, **shape: int) -> Found:
    """Compares tokens of the base model on two ranks, of these settings, with those of a CPU.
    Images of the pack are not cut, so that no adapter can be served. Raises AssertionError if too
    many differ."""
    recorded = [each for each in read_recorded(context.pack) if not each.request.key]
    config: Any = engine_config(context.pack, "cuda", **shape)
    store = make_store(context.pack)
    engine = EngineThread(config, store, partial(store_of_child, context.pack))
    requests = [each.request for each in recorded]
    made = generate(engine, requests, max(1.0, context.deadline.left_s), num_ranks=2)
    found = compare(recorded, made)
    assert found["greedy_share"] is None or found["greedy_share"] >= MIN_SHARE, str(found)
    return found
