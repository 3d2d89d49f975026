"""Small models that read pictures, with the files of their processors, and adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken

from tests.support.models.tokenizers import byte_level, save_tokenizer
from tests.support.models.zoo import AdapterSpec, Zoo, adapted, shake_norms_and_biases

TILE, PATCH, VOCAB = 56, 14, 420
IMAGE = "<image>"
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
    "Idefics3": ("Idefics3", _IDEFICS3),
    "SmolVLM": ("SmolVLM", _IDEFICS3),
}
"""The class of each model, and the values of its config."""
NAMES = tuple(READERS)
_SPLIT = {"size": {"longest_edge": 3 * TILE}, "max_image_size": {"longest_edge": TILE}}
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
    "Idefics3": _SPLIT | {"image_processor_type": "Idefics3ImageProcessor"},
    "SmolVLM": _SPLIT | {"image_processor_type": "SmolVLMImageProcessor"},
}
"""The preprocessor_config.json of each model."""
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As published with llava-hf/llava-1.5-7b-hf and HuggingFaceTB/SmolVLM-256M-Instruct."""
_MARKS = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"]
_MARKS += [f"<row_{y}_col_{x}>" for y in range(1, 4) for x in range(1, 4)]
LINEAR = r".*(language|text)_model\..*\.(q|k|v|o|gate|up|down)_proj"
SPECS = (
    AdapterSpec("linear", 5, LINEAR, {"use_rslora": True}),
    AdapterSpec("attention", 8, r".*(language|text)_model\..*self_attn\.[qkvo]_proj"),
)
TOWERS = (
    AdapterSpec("tower", 3, r".*(vision_tower|vision_model)\..*self_attn\.[qv]_proj"),
    AdapterSpec("connector", 3, r".*(multi_modal_projector\.linear_1|modality_projection\.proj)"),
)
"""Adapters of parts that a server which reads pictures does not adapt."""


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
    kind = getattr(transformers, values["image_processor_type"] + "Pil")
    return kind(**{key: value for key, value in values.items() if key != "image_processor_type"})


def save_reader_tokenizer(name: str, folder: Path) -> int:
    """Writes a tokenizer with the tokens of pictures; returns the id of the placeholder."""
    backend = byte_level()
    texts = [IMAGE, *_MARKS]
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in texts])
    save_tokenizer(backend, folder, LLAVA_TEMPLATE if "Llava" in name else SMOLVLM_TEMPLATE)
    assert backend.get_vocab_size() <= VOCAB
    return int(backend.token_to_id(IMAGE))


def make_reader(name: str, folder: Path, **changes: Any) -> Any:
    """Saves a small random model that reads pictures in fp32, with its tokenizer and processor, and
    `changes` of its config; returns transformers' model."""
    torch.manual_seed(0)
    family, values = READERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    token_id = save_reader_tokenizer(name, folder)
    config = getattr(transformers, f"{family}Config")(**values | changes, image_token_id=token_id)
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    model = kind._from_config(config, dtype=torch.float32).eval()
    shake_norms_and_biases(model)
    with torch.no_grad():  # else answers hardly depend on pictures
        projector = "multi_modal_projector" if family == "Llava" else "connector"
        for each in getattr(model.model, projector).parameters():
            each.mul_(8 if each.dim() > 1 else 1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    save_processor(name, folder)
    model.name_or_path = model.config.name_or_path = name
    return model


@dataclass
class ReaderZoo:
    """A model that reads pictures with adapters of its language part: on disk, and as
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
        return {k: found[k] for k in ("input_ids", "pixel_values") if k in found}

    def greedy(self, adapter: str, inputs: dict[str, torch.Tensor], count: int) -> list[int]:
        """Returns the oracle's tokens, in fp32, past any end token."""
        model = self.zoo.reference
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            if adapter:
                model.set_adapter(adapter)
                out = model.generate(**inputs, **options)
            else:
                with model.disable_adapter():
                    out = model.generate(**inputs, **options)
        return [int(each) for each in out[0, inputs["input_ids"].shape[1] :]]


def make_reader_zoo(name: str, folder: Path) -> ReaderZoo:
    model = make_reader(name, folder / "model")
    specs = (*SPECS, *TOWERS)
    reference = adapted(model, name, folder / "adapters", specs)
    dirs = {spec.name: folder / "adapters" / spec.name for spec in specs}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    pictures = image_processor(name)
    if "Llava" in name:
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
