"""How many kernels a recorded decode step launches, each some microseconds that nothing hides."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bench.gpu_launches import META, launches
from tests.gpu.models import Model, make_geometry

NUM_LAYERS = 32
LIMITS = {False: 360, True: 620}
"""By whether rows have adapters."""


@pytest.mark.parametrize("with_lora", LIMITS)
def test_a_decode_step_launches_few_kernels(tmp_path, with_lora):
    geometry = make_geometry("llama", tmp_path, num_hidden_layers=NUM_LAYERS)
    backend = Model.make(geometry, torch.float32, META).fixed(lambda compute: None)
    with launches() as noted:
        backend._decode(1, with_lora)
    counts = Counter(launch.name for launch in noted.launches)
    assert counts.total() <= LIMITS[with_lora], str(counts)
    assert counts["add_rms_norm_kernel"] == 2 * NUM_LAYERS + 1
    assert counts["swiglu_kernel"] == counts["store_kernel"] == NUM_LAYERS
    assert counts["rotary_angles_kernel"] == counts["argmax"] == 1
    assert ("shrink_kernel" in counts) == with_lora
