"""The engine's policy is plain Python: it is imported where there is no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

POLICY = (
    "scheduler preemption step_budget prices fair_queue tenant_queue siblings version_moves "
    "admission settle states.states"
)


@pytest.mark.processes
def test_policy_needs_no_torch() -> None:
    lines = ["import sys", "sys.modules['torch'] = None"]
    lines += [f"import inference_svc.engine.policy.{name}" for name in POLICY.split()]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
