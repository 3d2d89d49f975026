"""Writes docs/models.md from the descriptions in the modules of model families.

python -m tools.pages.model_docs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inference_svc.backends.select import BACKENDS
from inference_svc.model.architectures import Family, encoder_families, families
from inference_svc.model.architectures.encoders import MODEL
from inference_svc.model.gguf.blocks import FORMATS as TYPES_OF_GGUF
from inference_svc.model.quantised import read_scheme
from inference_svc.model.quantised.gguf import GgufScheme
from kernels.quantised import WeightFormat

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "models.md"
PUBLISHED = ROOT / "tests" / "inference_svc" / "model" / "published"
"""The config.json of each tested published model."""
MODULE, EXPERTS = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.down_proj"
_GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 128}
_INT8 = {"num_bits": 8, "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float"}
_BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def _compressed(form: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    """Returns a quantization_config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "bitsandbytes, NF4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    },
    "bitsandbytes, INT8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "GPTQ, 4 bits": {**_GPTQ, "sym": True},
    "GPTQ, 4 bits, zero points": {**_GPTQ, "sym": False},
    "GPTQ, 8 bits": {**_GPTQ, "bits": 8},
    "GPTQ, act-order": {**_GPTQ, "desc_act": True},
    "compressed-tensors, INT4": _compressed("pack-quantized", _GROUPS),
    "compressed-tensors, INT4, zero points": _compressed(
        "pack-quantized", {**_GROUPS, "symmetric": False}
    ),
    "compressed-tensors, INT4, act-order": _compressed(
        "pack-quantized", {**_GROUPS, "actorder": "group"}
    ),
    "compressed-tensors, INT8": _compressed("int-quantized", _INT8),
    "compressed-tensors, INT8 with INT8 inputs (W8A8)": _compressed(
        "int-quantized", _INT8, input_activations=_TOKENS
    ),
    "compressed-tensors, FP8 per tensor or output": _compressed(
        "float-quantized", {**_FP8, "strategy": "channel"}
    ),
    "compressed-tensors, FP8 in blocks": _compressed("float-quantized", {**_FP8, **_BLOCKS}),
    "FP8 of DeepSeek and Qwen, in blocks": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "FP8, per tensor": {"quant_method": "fp8"},
    "FP8 of FBGEMM": {"quant_method": "fbgemm_fp8"},
    "MXFP4, experts of gpt-oss": {"quant_method": "mxfp4"},
    **{f"GGUF, {kind}": GgufScheme({MODULE: kind}).to_config() for kind in TYPES_OF_GGUF},
}
"""The quantization_config of each published kind of checkpoint."""
PAGE = r"""# Models

You can serve models whose `config.json` names one of these architectures, in fp32, bf16 or fp16,
on CPUs and on GPUs. Your adapters may change every linear layer, the embedding and the head, unless
the table says otherwise, and replace
[norms, biases, embedding and head](adapters.md#what-adapters-have-besides-a-and-b). Each family is
one module of data; you can [add one](development/add-an-architecture.md). On CPUs you can divide a
model of each family over [several processes](operations/ranks.md), if
its sizes divide.

| architecture | family and features |
|---|---|
{rows}

`config.json` decides which of these features a model has. At start the server refuses, by its key,
a value that would change the maths and that it does not compute, and it refuses tensors that are
missing, unexpected or of another shape. Before it loads anything, it names a tokenizer or shard
that is missing, broken or only a pointer of Git LFS. If `config.json` ties head and embedding but
the checkpoint has a different head, the server uses that head, as transformers does, and logs a
warning. We test configs of these published models, with all keys of their authors:

{published}

Other sizes of a model, and models trained from it, mostly have the same architecture: look at
`architectures` in the model's `config.json`.

## GGUF files

You can serve a GGUF file of a Llama, Qwen 2 or 3, or Gemma 2 or 3: name a folder with one `.gguf`
and no `config.json`, or name the file. Weights keep their few bits. Supported types are `Q4_0`,
`Q4_1`, `Q5_0`, `Q5_1`, `Q8_0`, `Q4_K`, `Q5_K` and `Q6_K`, so files such as `Q4_K_M`, and `F32`,
`F16` and `BF16`. The server dequantises an embedding when it loads the model. The tokenizer, the
chat template and the tokens that end an answer come from the file.

Adapters name the model that they were trained on. A server of `Qwen3-0.6B-Q4_K_M.gguf` is named
`Qwen3-0.6B`, so that adapters of `Qwen/Qwen3-0.6B` find it; a server of a folder is named as the
folder. If neither is the model's name, set `--base-model`.

The server refuses, by key and value, metadata and types that it does not compute. Join a model in
several files first, with llama.cpp's `llama-gguf-split`.

## Weights in few bits

The table has each kind of [quantised checkpoint](quantisation.md), the form in which a server holds
its weights, with common sizes of groups, and the code that multiplies by them: on CPUs, on CPUs
with `native-kernels = false`, and on GPUs. `loadout info` shows it for your server. "dequantised"
is the fallback, which is slow: torch dequantises the weights in each step. With `--quantize` you
get the forms int4, int8 and fp8, with the same code. A GPU needs groups of 16, 32, 64 ... inputs,
or one scale for each output, and the server refuses others by name.

| checkpoint | held as | CPU | CPU, torch | GPU |
|---|---|---|---|---|
{formats}

## Adapters of whole models

If you train with `target_modules="all-linear"`, or with names such as `["q_proj", "v_proj"]`, you
also train the other towers. A server that [reads images](images.md) applies these changes; a server
of text alone leaves them out. To train only the text part with PEFT, use a pattern:

```python
target_modules = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
```

For Idefics3 and SmolVLM the name is `text_model`.

For Qwen 3.5 and 3.6 add the projections of the gated delta net, which three of four layers have:
`|in_proj_qkv|in_proj_z|in_proj_a|in_proj_b|out_proj`.

## Hybrids: models with recurrent layers

Three of four layers of Qwen 3.5 and 3 Next, and most layers of LFM 2, keep a state of fixed size
per request, in fp32. You can ask these models for everything that you can ask others for. Their
limits:

- **Memory**: two states for each request that may run. So `--max-sequences` follows from the memory
  by default: [sizing](operations/sizing.md#models-with-recurrent-layers).
- **Prefix cache**: a prompt goes on from the last stored state of its prefix, not from its last
  page, and tokens after that are computed again. States are stored every `--state-interval-tokens`,
  and at the end of each prompt's last full page. With `--stored-states 0` each of several answers
  (`n`) computes the prompt.
- **Adapters** change every projection, and norms may be replaced (`modules_to_save`); not the
  convolutions (`conv1d`, `conv.conv`) and the decays (`A_log`, `dt_bias`). Train with
  `target_modules="all-linear"`, or with these names of recurrent layers:

| models | projections of recurrent layers |
|---|---|
| Qwen 3.5 and 3.6 | `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, `out_proj` |
| Qwen 3 Next | `in_proj_qkvz`, `in_proj_ba`, `out_proj` |
| LFM 2 and its mixtures | `conv.in_proj`, `conv.out_proj` |

## Classes without the head of a language model

A checkpoint may have the class without a head, such as `Qwen3Model`, or with a classifier's, such
as `LlamaForSequenceClassification`, of any architecture above. Such a server does not generate: it
[embeds or classifies](embeddings.md).

## Encoders

You can [embed and classify](embeddings.md#encoders) with these models and their adapters, on CPUs:

| class | family and features |
|---|---|
{encoders}

A checkpoint may also have the class `...ForMaskedLM`, whose head is left out,
`...ForSequenceClassification` or `...ForTokenClassification`.

## Models that are not served

- Quantised checkpoints of other schemes than the ones in [base models in few
  bits](quantisation.md): serve the checkpoint that was quantised.
- Sounds and videos: of models that take them the text part is served, and a message with such a
  part is refused. Gemma 3, Mistral 3, LLaVA, Idefics3, SmolVLM, and Qwen from 2 VL on read
  [images](images.md).
- Weights in other files than safetensors, such as `pytorch_model.bin`: save the model again with
  transformers' `save_pretrained`.
"""


def render() -> str:
    """Returns the page, with a row for each module from its own text."""
    published = "\n".join(f"- `{path.stem}`" for path in sorted(PUBLISHED.iterdir()))
    encoders = {name: each for name, each in encoder_families().items() if name.endswith(MODEL)}
    return PAGE.format(
        rows="\n".join(_rows(families())),
        encoders="\n".join(_rows(encoders)),
        published=published,
        formats="\n".join(_formats()),
    )


def _rows(families: Mapping[str, Family]) -> Iterator[str]:
    """Yields a row for each module, from its own text."""
    names: dict[str, list[str]] = {}
    for name, family in families.items():
        names.setdefault(family.module, []).append(f"`{name}`")
    for module, found in sorted(names.items()):
        yield f"| {', '.join(found)} | {' '.join((sys.modules[module].__doc__ or '').split())} |"


def _formats() -> Iterator[str]:
    """Yields a row for each kind of quantised checkpoint."""
    by_name = {factory.name: factory for factory in BACKENDS}
    factories = [by_name[name] for name in ("native", "torch", "CUDA")]
    for label, config in CHECKPOINTS.items():
        form = _form_of(config)
        held = "plain weights: dequantised while they are read" if form is None else str(form)
        kernels = ["as plain" if form is None else each.weight_kernels(form) for each in factories]
        yield f"| {' | '.join((label, held, *kernels))} |"


def _form_of(config: dict[str, Any]) -> WeightFormat | None:
    """Returns the form in which servers hold the weights of a checkpoint in bfloat16."""
    scheme = read_scheme({"quantization_config": config, "dtype": "bfloat16"})
    assert scheme is not None
    sizes = (256, 256)
    matrix = scheme.matrix(MODULE, *sizes) or scheme.matrix(EXPERTS, *sizes, 2)
    assert matrix is not None
    return matrix.format


def main() -> None:
    PATH.write_text(render())


if __name__ == "__main__":
    main()
