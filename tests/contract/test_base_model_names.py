"""The model that a config means, by its own name, a path, or the name of a quantized copy."""

from __future__ import annotations

import pytest

from contract.base_model_names import find_named, hub_name, may_mean, trained_form, without_form


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/cache/models--org--llama/snapshots/0a", "org/llama"),
        ("/cache/models--gpt2/snapshots/0a", "gpt2"),
        ("/cache/llama", ""),
    ],
)
def test_names_of_cached_models(path: str, name: str) -> None:
    assert hub_name(path) == name


@pytest.mark.parametrize(
    ("in_config", "may"),
    [
        ("", True),
        ("org/Llama", True),
        ("copy/llama", True),
        ("copy/llama-bnb-4bit", True),
        ("copy/Llama-3", False),
        ("/runs/llama.Q4_K_M.gguf", True),
        ("/runs/llama", True),
        ("/cache/models--org--llama/snapshots/0a", True),
        ("org/other", False),
        ("/runs/other", False),
    ],
)
def test_a_config_may_mean_a_model(in_config: str, may: bool) -> None:
    assert may_mean(in_config, ["org/llama"]) == may
    assert bool(find_named(in_config, {"served": ["org/llama"]})) == (may and in_config != "")


@pytest.mark.parametrize(
    ("name", "plain", "form"),
    [
        ("unsloth/llama-bnb-4bit", "unsloth/llama", "nf4"),
        ("unsloth/llama-unsloth-bnb-4bit", "unsloth/llama", "nf4"),
        ("org/llama-bnb-8bit", "org/llama", "int8"),
        ("org/llama-AWQ", "org/llama", "int4"),
        ("org/llama-AWQ-4bit", "org/llama", "int4"),
        ("org/llama-GPTQ", "org/llama", "int4"),
        ("org/llama-GPTQ-Int4", "org/llama", "int4"),
        ("org/llama-GPTQ-Int8", "org/llama", "int8"),
        ("org/llama-quantized.w4a16", "org/llama", "int4"),
        ("org/llama-quantized.w8a8", "org/llama", "int8"),
        ("org/llama-FP8", "org/llama", "fp8"),
        ("org/llama-FP8-dynamic", "org/llama", "fp8"),
        ("org/llama-MXFP4", "org/llama", "mxfp4"),
        ("mlx-community/llama-4bit", "mlx-community/llama", "4-bit"),
        ("mlx-community/llama-8bit", "mlx-community/llama", "8-bit"),
        ("org/llama-GGUF", "org/llama", "gguf"),
        ("llama-Q4_K_M", "llama", "gguf"),
        ("llama.Q4_1.gguf", "llama", "gguf"),
        ("llama-UD-Q4_K_XL.gguf", "llama", "gguf"),
        ("llama.i1-IQ4_XS.gguf", "llama", "gguf"),
        ("llama-q8.gguf", "llama", "gguf"),
        ("llama-BF16.gguf", "llama", ""),
        ("llama-bf16", "llama", ""),
        ("llama.gguf", "llama", ""),
        ("Q4_0.gguf", "Q4_0", ""),
        ("qwen-q2", "qwen-q2", ""),
        ("-4bit", "-4bit", ""),
        ("org/llama", "org/llama", ""),
        ("", "", ""),
    ],
)
def test_names_of_copies(name: str, plain: str, form: str) -> None:
    found = trained_form(name)
    assert (without_form(name), found.name if found else "") == (plain, form)


@pytest.mark.parametrize(
    "path", ["/runs/llama-bnb-4bit/", "/cache/models--unsloth--llama-bnb-4bit/snapshots/0a"]
)
def test_a_path_tells_the_form(path: str) -> None:
    found = trained_form(path)
    assert found is not None
    assert found.name == "nf4"


@pytest.mark.parametrize(
    ("name", "served_as", "others"),
    [
        ("llama-bnb-4bit", ("nf4",), ("", "int4", "fp8", "gguf q4_k")),
        ("llama-4bit", ("nf4", "int4", "fp8 int4", "gguf q4_0"), ("", "int8", "gguf q8_0")),
        ("llama-GGUF", ("gguf q4_0", "gguf q6_k"), ("", "int4")),
    ],
)
def test_servers_of_the_form(
    name: str, served_as: tuple[str, ...], others: tuple[str, ...]
) -> None:
    form = trained_form(name)
    assert form is not None
    assert all(map(form.is_served_as, served_as))
    assert not any(map(form.is_served_as, others))


@pytest.mark.parametrize(
    ("in_config", "found"),
    [
        ("org/llama", ["org/llama"]),  # the plain model, before copies
        ("unsloth/llama-bnb-4bit", ["org/llama"]),
        ("org/llama-AWQ", ["org/llama-AWQ"]),
        ("org/qwen", ["org/qwen-GPTQ-Int4"]),
        ("unsloth/qwen-bnb-4bit", ["org/qwen-GPTQ-Int4"]),
        ("org/gemma", ["gemma-FP8", "gemma-GGUF"]),
    ],
)
def test_copies_mean_one_model(in_config: str, found: list[str]) -> None:
    served = ("org/llama", "org/llama-AWQ", "org/qwen-GPTQ-Int4", "gemma-FP8", "gemma-GGUF")
    assert find_named(in_config, {name: [name] for name in served}) == found
