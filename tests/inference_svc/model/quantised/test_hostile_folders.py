"""Folders with weights in few bits whose tensors do not fit are refused by name, before anything is
allocated for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_svc.errors import UnsupportedModel
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.tensors import check_tensors
from inference_svc.model.checkpoint.wrapper import Wrapper
from inference_svc.model.quantised.modules import StoredModules
from kernels.quantised import Codes, WeightFormat
from tests.support.models.families import MODELS
from tests.support.models.saved_weights import FORMATS, MODULE, pack, scheme_of

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
"""Sizes of whole blocks of all formats."""
FIRST = "model.layers.1.mlp.down_proj."
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def refusal(folder: Path, tensors: dict[str, Tensor]) -> str:
    """Returns the message that refuses a folder with these tensors, "" if none does."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        check_tensors(folder, load_description(folder))
    except UnsupportedModel as error:
        return str(error)
    return ""


def changes(tensor: Tensor) -> Iterator[Tensor | None]:
    """Yields the tensor with other shapes and with another dtype, and None: it is missing."""
    yield torch.cat((tensor, tensor)) if tensor.dim() else tensor.repeat(2)
    yield tensor[None].clone() if tensor.dim() else tensor.repeat(1, 1)
    yield tensor.to(torch.int16 if tensor.dtype == torch.float64 else torch.float64)
    yield None


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_of_each_format_have_their_shapes_and_dtypes(
    form: str, random_model: Callable[..., Any], save_model: Callable[..., Path]
) -> None:
    kind: tuple[str, Any] = MODELS["gpt-oss" if form == "mxfp4" else "llama"]
    folder = save_model(random_model(kind[0], **{**kind[1], **SIZES}))
    pack(folder, form)
    tensors = load_file(folder / "model.safetensors")
    start = EXPERTS if form == "mxfp4" else FIRST
    names = [name for name in tensors if name.startswith(start) and not name.endswith("bias")]
    assert len(names) >= 2
    assert not refusal(folder, tensors)
    accepted = []
    for name in names:
        others = {key: each for key, each in tensors.items() if key != name}
        for number, changed in enumerate(changes(tensors[name])):
            made = others if changed is None else {**others, name: changed}
            message = refusal(folder, made)
            if start.rstrip(".") not in message and not is_checked_later(name, number):
                accepted.append((name, number, message))
    assert not accepted


def is_checked_later(name: str, number: int) -> bool:
    """Whether a change of `changes` may pass: a file may lack the tensor or, where weights are
    decoded, have another one of two in its place; or only the file knows its length."""
    if number == 0:
        return name.endswith("quant_state.bitsandbytes__nf4")
    return number == 3 and name.endswith(("g_idx", "weight_shape", "weight_scale"))


@pytest.mark.parametrize("group_size", [8, 32, -1])
def test_rows_have_as_many_groups_as_kernels_take(group_size: int) -> None:
    """A small file may claim more than any kernel has room for."""
    scheme = scheme_of({"quant_method": "awq", "bits": 4, "group_size": group_size}, "bfloat16")
    modules = StoredModules(scheme, Wrapper(), {})
    most = WeightFormat(Codes.UINT4, max(group_size, 0), has_offsets=True).max_inputs
    assert modules.matrix(MODULE, 8, most) is not None
    with pytest.raises(
        UnsupportedModel, match=f"^{MODULE}: {2 * most} inputs of uint4, .* {most} "
    ):
        modules.matrix(MODULE, 8, 2 * most)
