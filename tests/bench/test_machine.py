"""The machine of a result."""

from __future__ import annotations

import pytest

from bench.machine import machine
from inference_svc.host.cpus import find_processor


@pytest.mark.processes  # Python runs a command to name the system
def test_a_result_names_the_processor_and_its_cores() -> None:
    found, processor = machine(computes_on_gpu=True), find_processor()
    facts = [found[name] for name in ("cpu", "cores", "processors", "cpu_quota")]
    assert facts == [*processor]
