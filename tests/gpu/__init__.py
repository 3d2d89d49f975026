"""What must hold on a GPU; needs nothing but torch, triton, numpy and pytest.

    python -m pytest -W default tests/gpu              on a machine with a CUDA device
    TRITON_INTERPRET=1 python -m pytest tests/gpu      on the CPU, through Triton's interpreter

Elsewhere nothing here is collected: `make gpu-emulate` runs all of it in processes of their own,
and `tests/test_gpu_emulated.py` the tests marked `smoke`.

conftest    the device, or its emulation

Models, adapters and batches are in `tests/support/gpu`.
"""
