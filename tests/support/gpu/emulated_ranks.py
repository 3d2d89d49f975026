"""Ranks of the CUDA backend over a CPU's memory: processes as they are, gloo in the place of NCCL,
and recordings that compute anew. Torch computes, or Triton's interpreter if TRITON_INTERPRET is 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from bench.gpu_run.emulation import EmulatedFactory, EmulatedMeeting, emulated
from inference_svc.backends.cuda.graphs import RecordingFailed
from inference_svc.backends.exchange import LOCAL
from inference_svc.core import EngineConfig
from inference_svc.engine import build
from inference_svc.engine.ranks import main as rank_main
from inference_svc.engine.ranks import peers
from inference_svc.engine.ranks.nodes import main as node_main
from inference_svc.engine.ranks.nodes import node
from inference_svc.engine.ranks.orphans import rank_command
from inference_svc.model.description import Decoder
from tests.support.gpu.models import Eager

FAILS = "EMULATED_RANKS_CANNOT_RECORD"
"""A variable of the environment, by which other ranks than the first cannot record steps."""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class EmulatedRanks(EmulatedFactory):
    """The factory of ranks without devices."""

    instructions = "an emulated device"
    can_record = True

    def open_meeting(
        self, count: int, num_threads: int, timeout_s: float, num_stages: int = 1, address: str = ""
    ) -> EmulatedMeeting:
        return EmulatedMeeting(count, timeout_s, address or LOCAL, num_stages)

    def make_recorder(self, wait: Callable[[], None] | None) -> Callable[..., Any]:
        return Eager if self.can_record else _fail


def _fail(compute: Callable[[], None]) -> Any:
    compute()
    raise RecordingFailed("no room for a recording")


def _select(config: EngineConfig, decoder: Decoder) -> EmulatedRanks:
    return EmulatedRanks()


@contextmanager
def emulated_ranks(
    command: Callable[[str], list[str]] = rank_command,
) -> Iterator[None]:
    """Within the context, engines and their ranks compute as on devices. `command` returns the
    command of a rank by the module that has its main function."""

    def emulated_command(module: str) -> list[str]:
        """Returns the command of a rank of this machine, or of another node, as the module says."""
        return [*command(__name__), module]

    with ExitStack() as stack:
        if IS_INTERPRETED:
            stack.enter_context(emulated())
        else:
            name = lambda *device: "an emulated device"  # noqa: E731
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_name", name))
        for module in (build, rank_main, node, node_main):
            stack.enter_context(mock.patch.object(module, "select_backend", _select))
        for module in (peers, node):
            stack.enter_context(mock.patch.object(module, "rank_command", emulated_command))
        yield


def main() -> None:
    """Replaces `engine.ranks.main`, and the one of nodes."""
    if IS_INTERPRETED:
        from tests.support.kernels import interpreter, worker

        worker.teach_the_interpreter_ranges()  # first: the other changes keep it
        interpreter.make_it_fast()
    EmulatedRanks.can_record = FAILS not in os.environ
    replaced = {each.__name__: each for each in (rank_main, node_main)}[sys.argv[-1]]
    with emulated_ranks():
        replaced.main()
