"""Names of an adapter's tensors, as a model in training has them."""

from __future__ import annotations

import re

_WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
    r"|(?:(?<=\.)|^)module\.(?=(?:_orig_mod\.)?base_model\.)"
)


def unwrapped(name: str) -> str:
    """Returns the name without the parts that torch's wrappers put into it: `torch.compile`, FSDP,
    activation checkpointing and DistributedDataParallel."""
    if "module." not in name and "_mod." not in name:  # of thousands of names, nearly all
        return name
    return _WRAPPERS.sub("", name)
