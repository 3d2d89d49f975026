"""A server whose device fails on command: `python -m tests.inference_svc.engine.bad_device FOLDER
ARGUMENTS` is `python -m inference_svc ARGUMENTS`, with an engine in a process of its own whose
backend does what the file `FOLDER/fault` says.

"hang": a step never ends. "scarce": there is no memory for steps of more than a token. "full":
others have all but a MiB of the device. Anything else is an error of CUDA, which each step raises.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc import app
from inference_svc.backends.base import DeviceMemory
from inference_svc.backends.torch import TorchBackend, TorchFactory
from inference_svc.config import InferenceSettings
from inference_svc.frontend import watchdog
from inference_svc.store.client import ImageClientRecipe

FAULT = "fault"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class BadDevice:
    """A StoreFactory that makes the backend of its process bad, then what the real one makes."""

    folder: Path
    config: InferenceSettings

    def __call__(self, publish: Callable[[Any], None]) -> Any:
        if self.fault() == "full":
            memory = DeviceMemory(1 << 20, 80 * GIB)
            TorchFactory.device_memory = lambda *_: memory  # type: ignore[method-assign]
        forward = TorchBackend.forward

        def fail(backend: Any, inputs: Any) -> Any:
            fault = self.fault()
            if fault == "hang":
                threading.Event().wait()
            if fault == "scarce" and len(inputs.step.token_ids) > 1:
                raise RuntimeError("Triton Error [CUDA]: out of memory")
            if fault not in ("", "scarce"):
                raise RuntimeError(fault)
            return forward(backend, inputs)

        TorchBackend.forward = fail  # type: ignore[method-assign]
        return ImageClientRecipe(self.config)(publish)

    def fault(self) -> str:
        path = self.folder / FAULT
        return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    from inference_svc.__main__ import main
    from tests.inference_svc.engine import bad_device  # by its name: the engine unpickles it
    from tests.support import forks

    if forks.ADDRESS in os.environ:
        forks.fork_engines()
    watchdog.CHECK_SECONDS, watchdog.CONFIRM_SECONDS = 0.2, 1.0
    folder = Path(sys.argv[1])
    app.ImageClientRecipe = lambda config: bad_device.BadDevice(folder, config)  # type: ignore
    sys.exit(main(sys.argv[2:]))
