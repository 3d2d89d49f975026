"""Small models that read pictures, with the files of their processors, and adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from inference_svc.pictures.sizes import TileForm
from tests.support.models.zoo import AdapterSpec, Zoo, adapted, shake_norms_and_biases
from tests.support.pictures.processors import Gemma4Processor, MistralProcessor, QwenProcessor
from tests.support.pictures.templates import GEMMA3_TOKENS, VOCAB, save_reader_tokenizer

TILE, PATCH = 56, 14
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}
_IDEFICS3: dict[str, Any] = {"text_config": _TEXT, "vision_config": VISION, "scale_factor": 2}
_QWEN_TEXT: dict[str, Any] = _TEXT | {
    "num_attention_heads": 4,
    "head_dim": 12,
    "initializer_range": 0.25,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 100.0},
}
_QWEN_VISION = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}
_QWEN_SIZES = {"hidden_size": 32, "intermediate_size": 52, "out_hidden_size": 48}
_GEMMA4_TEXT: dict[str, Any] = _TEXT | {
    "num_attention_heads": 4,
    "head_dim": 12,
    "global_head_dim": 16,
    "sliding_window": 10,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_GEMMA4_VISION = {
    key: VISION[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "position_embedding_size": 300,
    "initializer_range": 0.2,
}
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llava": (
        "Llava",
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        },
    ),
    "LlavaOfSiglip": (
        "Llava",
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "projector_hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "Gemma3": (
        "Gemma3",
        {
            "text_config": _TEXT
            | {
                "model_type": "gemma3_text",
                "num_key_value_heads": 2,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 10,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": VISION | {"model_type": "siglip_vision_model", "patch_size": 7},
            "mm_tokens_per_image": 16,
        },
    ),
    "Gemma4": (
        "Gemma4",
        {
            "text_config": _GEMMA4_TEXT
            | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
            "vision_config": _GEMMA4_VISION | {"standardize": True},
        },
    ),
    "Gemma4Small": (
        "Gemma4",
        {
            "text_config": _GEMMA4_TEXT
            | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1},
            "vision_config": _GEMMA4_VISION | {"use_clipped_linears": True},
            "audio_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [4, 4],
                "output_proj_dims": 16,
            },
        },
    ),
    "Mistral3": (
        "Mistral3",
        {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"model_type": "pixtral", "hidden_act": "silu"},
            "tie_word_embeddings": False,
        },
    ),
    "Idefics3": ("Idefics3", _IDEFICS3),
    "SmolVLM": ("SmolVLM", _IDEFICS3),
    "Qwen2VL": (
        "Qwen2VL",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": _QWEN_VISION | {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
        },
    ),
    "Qwen2_5_VL": (
        "Qwen2_5_VL",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": _QWEN_VISION
            | _QWEN_SIZES
            | {"window_size": 56, "fullatt_block_indexes": [1]},
        },
    ),
    "Qwen3VL": (
        "Qwen3VL",
        {
            "text_config": _QWEN_TEXT
            | {"rope_parameters": _QWEN_TEXT["rope_parameters"] | {"mrope_section": [3, 2, 1]}},
            "vision_config": _QWEN_VISION
            | _QWEN_SIZES
            | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
        },
    ),
    "Qwen3VLMoe": (
        "Qwen3VLMoe",
        {
            "text_config": _QWEN_TEXT
            | {
                "rope_parameters": _QWEN_TEXT["rope_parameters"] | {"mrope_section": [3, 2, 1]},
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "mlp_only_layers": [0],
            },
            "vision_config": _QWEN_VISION
            | _QWEN_SIZES
            | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
        },
    ),
    "Qwen3_5": (
        "Qwen3_5",
        {
            "text_config": _TEXT
            | {
                "num_attention_heads": 4,
                "head_dim": 24,
                "initializer_range": 0.2,
                "layer_types": ["linear_attention", "full_attention", "full_attention"],
                **{f"linear_num_{each}_heads": 2 for each in ("key", "value")},
                **{f"linear_{each}_head_dim": 16 for each in ("key", "value")},
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [3, 2, 1],
                    "rope_theta": 100.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            "vision_config": _QWEN_VISION | _QWEN_SIZES | {"num_position_embeddings": 25},
        },
    ),
}
"""The class of each model, and the values of its config."""
NAMES = tuple(READERS)
FREE = tuple(name for name in NAMES if name.startswith("Qwen"))
GEMMA4 = ("Gemma4", "Gemma4Small")
SQUARES = tuple(name for name in NAMES if name not in (*FREE, "Mistral3", *GEMMA4))
"""The models that read tiles of any size, and of one."""
_SPLIT = {"size": {"longest_edge": 3 * TILE}, "max_image_size": {"longest_edge": TILE}}
_FREE = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 56 * 28, "longest_edge": 3 * TILE * 3 * TILE},
    "patch_size": PATCH,
}
_FILLING = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "Llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": TILE},
        "crop_size": {"height": TILE, "width": TILE},
    },
    "LlavaOfSiglip": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": TILE, "width": TILE},
    },
    "Gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": TILE, "width": TILE},
    },
    "Mistral3": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 3 * TILE},
        "patch_size": {"height": PATCH, "width": PATCH},
    },
    "Gemma4": _FILLING,
    "Gemma4Small": _FILLING,
    "Idefics3": _SPLIT | {"image_processor_type": "Idefics3ImageProcessor"},
    "SmolVLM": _SPLIT | {"image_processor_type": "SmolVLMImageProcessor"},
    "Qwen2VL": _FREE | {"min_pixels": TILE * TILE, "max_pixels": 3 * TILE * 3 * TILE, "size": None},
    "Qwen2_5_VL": _FREE,
    "Qwen3VL": _FREE,
    "Qwen3VLMoe": _FREE,
    "Qwen3_5": _FREE,
}
"""The preprocessor_config.json of each model."""


def tile_form(name: str) -> TileForm:
    """Returns the form of a model's tiles, as far as processors read it."""
    if name == "Mistral3":
        return TileForm(0, PATCH, merge=2)
    if name in GEMMA4:
        return TileForm(0, PATCH, merge=2, most_per_side=300)
    if name.startswith("Qwen"):
        return TileForm(0, PATCH, merge=2, frames=2)
    return TileForm(TILE, PATCH)


LINEAR = r".*(language|text)_model\..*\.(q|k|v|o|gate|up|down)_proj"
TOWER = (
    r".*((vision_tower|vision_model)\..*(q_proj|v_proj|out_proj|fc1|fc2)|"
    r"visual\.blocks\..*(qkv|attn\.proj|down_proj|fc2))"
)
GEMMA4_TOWER = r".*vision_tower\..*(input_proj|[qvo]_proj\.linear|(up|down)_proj\.linear)"
"""Its linear layers lie in others that may clip."""
CONNECTOR = (
    r".*(multi_modal_projector\.linear_[12]|modality_projection\.proj|"
    r"embed_vision\.embedding_projection|"
    r"visual\.merger\.(mlp\.[02]|linear_fc[12]))"
)
SPECS = (
    AdapterSpec("of-text", 5, LINEAR, {"use_rslora": True}),
    AdapterSpec("of-tower", 3, TOWER, {"rank_pattern": {"fc1": 5}, "alpha_pattern": {"fc2": 1}}),
    AdapterSpec("of-connector", 4, CONNECTOR, {"use_rslora": True}),
    AdapterSpec("of-all", 4, "all-linear"),
)
"""Adapters of the language part, the tower, the connector, and all of them. PEFT saves tensors of
another adapter along if an adapter has a name that begins as a module's does."""


def cell_patches(pixels: torch.Tensor) -> torch.Tensor:
    """Returns the patches of a tile [3, height, width], cell by cell: [patches, 3, side, side]."""
    cells = pixels.unflatten(2, (-1, 2, PATCH)).unflatten(1, (-1, 2, PATCH))
    return cells.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)


def specs_of(name: str) -> tuple[AdapterSpec, ...]:
    """Returns the adapters of parts that a model has: Gemma 3's connector has no linear layer."""
    if name in GEMMA4:
        return tuple(
            replace(each, targets=GEMMA4_TOWER) if each.targets == TOWER else each for each in SPECS
        )
    return tuple(each for each in SPECS if name != "Gemma3" or each.name != "of-connector")


def save_processor(name: str, folder: Path, **changes: Any) -> None:
    """Writes the file of a model's processor."""
    text = json.dumps(PROCESSORS[name] | changes)
    (folder / "preprocessor_config.json").write_text(text)


def save_config(name: str, folder: Path) -> Path:
    """Writes a model's config and processor without weights, and returns the folder."""
    family, values = READERS[name]
    config = getattr(transformers, f"{family}Config")(**values).to_dict()
    folder.mkdir()
    named = config | {"architectures": [f"{family}ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(named))
    save_processor(name, folder)
    return folder


def image_processor(name: str, **changes: Any) -> Any:
    """Returns transformers' processor of pictures, which computes with Pillow."""
    values = PROCESSORS[name] | changes
    if name == "Mistral3":  # transformers' processor says so
        side = 2 * values["patch_size"]["height"]
        values |= {"patch_size": {"height": side, "width": side}}
    kind = getattr(transformers, values["image_processor_type"] + "Pil")
    return kind(**{key: value for key, value in values.items() if key != "image_processor_type"})


def make_reader(name: str, folder: Path, **changes: Any) -> Any:
    """Saves a small random model that reads pictures in fp32, with its tokenizer and processor, and
    `changes` of its config; returns transformers' model."""
    torch.manual_seed(0)
    family, values = READERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    ids = save_reader_tokenizer(name, folder)
    config = getattr(transformers, f"{family}Config")(**values | changes, **ids)
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    model = kind._from_config(config, dtype=torch.float32).eval()
    shake_norms_and_biases(model)
    with torch.no_grad():  # else answers hardly depend on pictures
        projectors = ("multi_modal_projector", "connector", "embed_vision")
        for key, each in model.model.named_parameters():
            if key.endswith("mm_input_projection_weight"):  # it is zeros
                each.normal_(std=0.5)
            each.mul_(8 if each.dim() > 1 and key.startswith(projectors) else 1)
        _shake_buffers(model)
        if name in GEMMA4:  # where it generates one of these, transformers goes on with padding
            placeholders = [ids[f"{each}_token_id"] for each in ("image", "audio", "video")]
            model.get_input_embeddings().weight[placeholders] = 0
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    save_processor(name, folder)
    model.name_or_path = model.config.name_or_path = name
    return model


def _shake_buffers(model: Any) -> None:
    """Moves the bounds of clipped layers, and what standardises, which do nothing at first."""
    for name, each in model.model.named_buffers():
        if name.endswith(("_min", "_max")):
            each.fill_((1 if name.endswith("max") else -1) * (0.5 + torch.rand(()).item()))
        elif name.endswith(("std_bias", "std_scale")):
            each.normal_(float(name.endswith("scale")), 0.2)


def _train(reference: Any) -> None:
    """Moves biases and the weights that adapters save whole, which are the base's at first."""
    for name, parameter in reference.named_parameters():
        is_bias = name.endswith(".bias") and ("lora_B" in name or parameter.requires_grad)
        if is_bias or "modules_to_save" in name:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


@dataclass
class ReaderZoo:
    """A model that reads pictures, with adapters: on disk, and as
    transformers' and PEFT's model and processor, which are the oracle."""

    name: str
    zoo: Zoo
    processor: Any

    def inputs(self, messages: Sequence[dict[str, Any]], pictures: Sequence[Image.Image]) -> Any:
        """Returns the inputs of a conversation with the contents of its messages in parts."""
        text = self.processor.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        given = {"images": [each.convert("RGB") for each in pictures]} if pictures else {}
        options = {"add_special_tokens": False, "return_tensors": "pt"}
        found = self.processor(text=text, **given, **options)
        others = {"attention_mask", "pixel_attention_mask"}
        return {key: each for key, each in found.items() if key not in others}

    def greedy(
        self,
        adapter: str,
        inputs: Mapping[str, torch.Tensor],
        count: int,
        guess: Sequence[int] = (),
    ) -> list[int]:
        """Returns the oracle's tokens, in fp32, past any end token. A right guess takes one step:
        the oracle chooses each of its tokens after the ones before it."""
        model, num_prompt = self.zoo.reference, inputs["input_ids"].shape[1]
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        if adapter:
            model.set_adapter(adapter)
        with torch.no_grad(), nullcontext() if adapter else model.disable_adapter():
            if len(guess) == count and marks_of(model.config).isdisjoint(guess):
                logits = model(**_continued(inputs, guess[:-1]), use_cache=False).logits[0]
                if logits[num_prompt - 1 :].argmax(dim=-1).tolist() == list(guess):
                    return list(guess)
            out = model.generate(**inputs, **options)
        return [int(each) for each in out[0, num_prompt:]]


def marks_of(config: Any) -> set[int]:
    """Returns the tokens that stand for pictures and videos, which a step may not have alone."""
    names = re.compile(r"(image|video|vision|audio)\w*_(id|index)")
    return {each for name, each in config.to_dict().items() if names.fullmatch(name)}


def _continued(
    inputs: Mapping[str, torch.Tensor], tokens: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Returns the inputs with these tokens after the prompt; all are of texts."""
    found = dict(inputs)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in found:
            found[name] = torch.nn.functional.pad(found[name], (0, len(tokens)))
    found["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([list(tokens)])], dim=1)
    return found


def make_reader_zoo(name: str, folder: Path, specs: Sequence[AdapterSpec] = SPECS) -> ReaderZoo:
    model = make_reader(name, folder / "model")
    specs = specs_of(name) if specs is SPECS else specs
    reference = adapted(model, name, folder / "adapters", specs, _train)
    dirs = {spec.name: folder / "adapters" / spec.name for spec in specs}
    marks = {"extra_special_tokens": GEMMA3_TOKENS} if name == "Gemma3" else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", **marks)
    pictures = image_processor(name)
    processor: Any
    if name.startswith("Qwen"):
        processor = QwenProcessor(pictures, tokenizer)
    elif name in GEMMA4:
        processor = Gemma4Processor(pictures, tokenizer)
    elif name == "Mistral3":
        processor = MistralProcessor(pictures, tokenizer)
    elif name == "Gemma3":
        processor = transformers.Gemma3Processor(pictures, tokenizer, image_seq_length=16)
    elif "Llava" in name:
        strategy = model.config.vision_feature_select_strategy
        has_class = model.config.vision_config.model_type == "clip_vision_model"
        processor = transformers.LlavaProcessor(
            pictures,
            tokenizer,
            patch_size=PATCH,
            vision_feature_select_strategy=strategy,
            num_additional_image_tokens=int(has_class),
        )
    else:
        processor = transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=4)
    return ReaderZoo(name, Zoo(name, folder / "model", reference, dirs), processor)
