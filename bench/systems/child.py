"""The parent's end: starts a system in its environment, and makes sure that it rests while others
are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from bench.peers.install import python_of, tcmalloc
from bench.systems.protocol import Done, Job, Spec, encode_job, encode_spec

REST_POLL_S = 0.05
REST_SHARE = 0.1
REST_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 20


class SystemFailed(Exception):
    """A system raised or died; the message has its traceback or the end of its log."""


@dataclass(frozen=True, slots=True)
class SystemKind:
    """How a system is started. `module` is bench.systems.<module>; `options` go into its Spec."""

    module: str
    python: Callable[[], str] = lambda: sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    preload: Callable[[], str] = lambda: ""
    options: dict[str, Any] = field(default_factory=dict)


_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in-process, as ours
    "VLLM_NO_USAGE_STATS": "1",
}


def _in_environment(peer: str) -> Callable[[], str]:
    return lambda: str(python_of(peer))


def _tuned() -> str:
    """What vLLM's own pages advise to load first on x86: Intel's OpenMP and TCMalloc.

    Raises FileNotFoundError: a loader only warns of what is missing, and vLLM would be slower.
    """
    openmp = python_of("vllm").parent.parent / "lib" / "libiomp5.so"
    if not openmp.is_file():
        raise FileNotFoundError(openmp)
    return f"{tcmalloc()}:{openmp}"


def _vllm(preload: Callable[[], str] = lambda: "", **options: Any) -> SystemKind:
    options = {"enforce_eager": True, "enable_lora": True} | options
    return SystemKind("vllm", _in_environment("vllm"), _VLLM_ENVIRONMENT, preload, options)


KINDS = {
    "ours": SystemKind("ours"),
    "ours-grpc": SystemKind("ours_grpc"),
    "vllm": _vllm(),
    "vllm-tuned": _vllm(_tuned),
    "vllm-tuned-no-lora": _vllm(_tuned, enable_lora=False),
    "vllm-compiled": _vllm(enforce_eager=False),
    "peft": SystemKind("peft", _in_environment("peft")),
}
"""Of vLLM several ways, so that it can be given its best."""


class Child:
    """One system in its process; raises SystemFailed. Its output goes to `log_path`."""

    def __init__(self, name: str, spec: Spec, log_path: Path) -> None:
        kind = KINDS[name]
        self.name = name
        self._log_path = log_path
        variables = os.environ | {
            "OMP_NUM_THREADS": str(spec.num_threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **kind.environment,
        }
        if preload := kind.preload():
            variables["LD_PRELOAD"] = preload
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [kind.python(), "-m", "bench.systems.serve", kind.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=variables,
                text=True,
            )
        message = encode_spec(spec) | {"options": spec.options | kind.options}
        self.facts: dict[str, str] = self._ask("load", spec=message)

    def set_resident(self, names: list[str]) -> None:
        self._ask("set_resident", names=names)

    def register(self, name: str, folder: Path) -> None:
        self._ask("register", name=name, folder=str(folder))

    def run(self, job: Job) -> Done:
        """Returns once the system rests again, so that the next to be measured has the machine."""
        done = Done(**self._ask("run", job=encode_job(job)))
        self.wait_for_rest()
        return done

    def wait_for_rest(self) -> None:
        """Until nothing of the system computes: threads of OpenMP spin for a while, some for ever.

        Raises SystemFailed when it does not come to rest.
        """
        deadline_s = time.monotonic() + REST_TIMEOUT_S
        before_s = self._processor_seconds()
        while time.monotonic() < deadline_s:
            time.sleep(REST_POLL_S)
            now_s = self._processor_seconds()
            if now_s - before_s < REST_POLL_S * REST_SHARE:
                return
            before_s = now_s
        raise SystemFailed(f"{self.name} keeps the processor busy while it has nothing to do")

    def _processor_seconds(self) -> float:
        process = psutil.Process(self._process.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def _ask(self, action: str, **values: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"action": action, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise SystemFailed(f"{self.name} died:\n" + "\n".join(tail))
        reply = json.loads(line)
        if "error" in reply:
            raise SystemFailed(f"{self.name}: {reply['error']}")
        return reply["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
