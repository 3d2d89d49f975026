"""Runs Triton operations in a process of their own; requests and answers are pickles.

Started by a fixture, with TRITON_INTERPRET set or not: Triton reads it once, when imported. A
request names a file, and one of its OPERATIONS, functions by name.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.support.kernels.poisoned import poisoned


class NoDevice:
    """Stands for a driver where there is no GPU: enough for a launch to be compiled."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class CompileOnly:
    """A kernel whose launches only compile, specialised exactly as the launch would be."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.compiled.append(self.kernel.run(*args, grid=grid, warmup=True, **kwargs))

        return launch


@cache
def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def teach_the_interpreter_ranges() -> None:
    """Lets a loop over bounds from memory run in the interpreter, whose scalars are arrays of one
    element: numpy turns these into indices no more."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_more


def main() -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if os.environ["TRITON_INTERPRET"] == "1":
        from tests.support.kernels import interpreter

        teach_the_interpreter_ranges()
        interpreter.make_it_fast()
    # As in the tests' own process.
    torch.empty = poisoned(torch.empty)
    while True:
        try:
            file, operation, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, load(file).OPERATIONS[operation](*args, **kwargs))
        except Exception:
            answer = (False, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
