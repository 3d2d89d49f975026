"""Tensors as the bytes of a .safetensors file: as its own library writes them."""

from __future__ import annotations

import enum
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from loadout._push.adapter import check_pairs, read_config, read_tensors, saved_name
from loadout._push.tensors import describe, in_order, pieces
from loadout._push.upload import METADATA
from loadout.errors import InvalidArgument
from tests.support.loadout.tensors import CONFIG, PREFIX, A, B

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def pair(rank: int = 2) -> dict[str, torch.Tensor]:
    return {A: torch.ones(rank, 3), B: torch.ones(4, rank)}


def framed(tensors, num_bytes: int) -> list[bytes]:
    described = [describe(name, values) for name, values in tensors.items()]
    return list(pieces(in_order(described), METADATA, num_bytes))


@given(
    st.dictionaries(
        st.text("ab.é_0", min_size=1, max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 300),
)
def test_the_bytes_are_those_of_safetensors(shapes, num_bytes) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape or ()).to(dtype) for name, (dtype, shape) in shapes.items()}
    found = framed(tensors, num_bytes)
    assert b"".join(found) == save(tensors, METADATA)
    assert all(len(piece) == num_bytes for piece in found[:-1])


def test_views_and_numpy_arrays_are_sent_as_their_values() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"t": base.T, "n": base.numpy()[:, ::2], "p": torch.nn.Parameter(base[1:])}
    found = load(b"".join(framed(tensors, 50)))
    assert torch.equal(found["t"], base.T)
    assert torch.equal(found["n"], base[:, ::2])
    assert torch.equal(found["p"], base[1:])


def test_only_one_tensor_is_read_at_a_time() -> None:
    read: list[int] = []

    def note(values: np.ndarray) -> memoryview:
        read.append(int(values[0]))
        return memoryview(values.view(np.uint8))

    arrays = {str(i): np.full(100, i, np.float32) for i in range(5)}
    described = in_order([describe(name, values) for name, values in arrays.items()])
    stream = pieces(described, METADATA, 400, note)
    next(stream)
    assert read == [0]
    next(stream)
    assert len(read) <= 2


class Kind(enum.Enum):
    LORA = "LORA"


class LoraConfig:
    def to_dict(self):
        return {"r": 2, "peft_type": Kind.LORA, "target_modules": {"v", "q"}, "x": None}


@pytest.mark.parametrize(
    "config", [LoraConfig(), LoraConfig().to_dict(), json.dumps(read_config(LoraConfig()))]
)
def test_a_config_is_what_peft_would_save(config) -> None:
    expected = {"r": 2, "peft_type": "LORA", "target_modules": ["q", "v"], "x": None}
    assert read_config(config) == expected


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        (A, A),
        (f"{PREFIX}.lora_A.default.weight", A),
        (f"{PREFIX}.lora_B.other-name.weight", B),
        (f"_orig_mod.{PREFIX}.lora_A.default.weight", A),
        (f"_fsdp_wrapped_module.{PREFIX}._checkpoint_wrapped_module.lora_B.default.weight", B),
        ("m.embed.lora_embedding_A.default", "m.embed.lora_embedding_A"),
        ("m.embed.lora_embedding_A", "m.embed.lora_embedding_A"),
        ("m.q.lora_magnitude_vector.default.weight", "m.q.lora_magnitude_vector"),
        ("m.q.lora_B.default.bias", "m.q.lora_B.bias"),
    ],
)
def test_names_are_those_that_peft_saves(given, saved) -> None:
    assert saved_name(given) == saved


@pytest.mark.parametrize(
    ("tensors", "subject", "message"),
    [
        ({}, "tensors", "the mapping is empty"),
        ([], "tensors", "not a mapping"),
        ({A: [1.0]}, A, "not a tensor"),
        ({A: torch.ones(2, 3, dtype=torch.float64)}, A, "dtype float64"),
        ({A: np.ones((2, 3), np.int32)}, A, "dtype int32"),
        ({A: np.ones((2, 3), ">f4")}, A, "little-endian"),
        ({A: torch.ones(2, 3, device="meta")}, A, "meta"),
        ({A: torch.ones(2, 3).to_sparse()}, A, "dense"),
        ({A: torch.ones(0)}, A, "no values"),
        ({A: torch.ones(2, 3)}, A, "without its lora_B"),
        ({B: torch.ones(2, 3)}, B, "without its lora_A"),
        ({A: torch.ones(2, 3), B: torch.ones(4, 3)}, B, "does not fit"),
        (pair(3), A, "the config's r is 2"),
        (
            {f"{PREFIX}.lora_A.{name}.weight": torch.ones(2, 3) for name in ("x", "y")},
            f"{PREFIX}.lora_A.y.weight",
            "one adapter at a time",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(tensors, subject, message) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)) as caught:
        check_pairs(read_tensors(tensors), CONFIG)
    assert caught.value.subject == subject


def test_ranks_of_their_own_are_left_to_the_store() -> None:
    check_pairs(read_tensors(pair(3)), CONFIG | {"rank_pattern": {"q_proj": 3}})


@pytest.mark.parametrize(
    ("config", "subject"),
    [("{", "config"), (3, "config"), ({"r": object()}, "r")],
)
def test_a_config_that_is_none_is_named(config, subject) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_config(config)
    assert caught.value.subject == subject


@pytest.mark.processes
def test_arrays_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from loadout import Client\n"
        "from loadout._push.tensors import describe, pieces\n"
        "a = np.arange(6, dtype=np.float32).reshape(2, 3)\n"
        "print(len(b''.join(pieces([describe('a', a)], {}, 10))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(save({"a": torch.ones(2, 3)}))
