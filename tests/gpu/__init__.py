"""What must hold on a GPU; needs nothing but torch, triton, numpy and pytest.

    python -m pytest -W default tests/gpu              on a machine with a CUDA device
    TRITON_INTERPRET=1 python -m pytest tests/gpu      on the CPU, through Triton's interpreter

Elsewhere nothing here is collected: `make gpu-emulate` runs all of it in processes of their own,
and `tests/test_gpu_emulated.py` the tests marked `smoke`.

conftest    the device, or its emulation
lora        LoRA of one step at fixed addresses, and what must hold of it
models      tiny decoders with random weights, adapters for them, and batches of their steps
shortage    a device with little memory, real or not
"""
