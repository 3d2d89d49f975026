"""A server's report of itself."""

from __future__ import annotations

from loadout import types
from loadout.inference.v1 import inference_pb2

LIMITS = types.ServerLimits(64, 4, 8, 8, 64, 16, 1000)
SERVER = types.ServerInfo(
    "llama", "llama", "float32", "cpu", "", LIMITS, (types.MemoryUse("arena", 50, 200),), {}, ""
)


def rank_status(
    index: int, *, answers: bool = True, num_threads: int = 3, stage: int = 0
) -> inference_pb2.RankStatus:
    """Returns the status of a rank that has computed five steps."""
    return inference_pb2.RankStatus(
        index=index,
        process_id=4711,
        answers=answers,
        resident_bytes=100,
        weights_bytes=40,
        kv_bytes=30,
        arena_bytes=20,
        num_steps=5,
        step_seconds=2.0,
        exchange_seconds=0.5,
        pulled_bytes=60,
        running_pulls=2,
        num_threads=num_threads,
        processors=[0, 1, 2, 7],
        stage=stage,
    )
