"""The chat templates of models that read pictures, and tokenizers with the tokens of pictures."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from tests.support.models.tokenizers import byte_level, save_tokenizer

VOCAB = 420

IMAGE, QWEN_IMAGE, MISTRAL_IMAGE = "<image>", "<|image_pad|>", "[IMG]"
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
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As published with llava-hf/llava-1.5-7b-hf, HuggingFaceTB/SmolVLM-256M-Instruct, and, without the
system's message and videos, Qwen/Qwen2.5-VL-7B-Instruct."""
GEMMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' }}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Writes parts as the one of google/gemma-3-4b-it does."""
GEMMA3_TOKENS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}
GEMMA4_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|turn>' + message['role'] + '\n' }}"
    "{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '\n\n<|image|>\n\n' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
    "{{ '<turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
"""Writes parts as the one of google/gemma-4-e2b-it does."""
GEMMA4_TOKENS = {"boi": "<|image>", "image": "<|image|>", "eoi": "<image|>"}
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[INST]{% for item in message['content'] %}"
    "{% if item['type'] == 'text' %}{{ item['text'] }}{% else %}[IMG]{% endif %}{% endfor %}"
    "[/INST]{% endfor %}"
)
TEMPLATES = {
    "Mistral3": MISTRAL_TEMPLATE,
    "Gemma4": GEMMA4_TEMPLATE,
    "Gemma4Small": GEMMA4_TEMPLATE,
    "Llava": LLAVA_TEMPLATE,
    "LlavaOfSiglip": LLAVA_TEMPLATE,
    "Gemma3": GEMMA3_TEMPLATE,
    "Idefics3": SMOLVLM_TEMPLATE,
    "SmolVLM": SMOLVLM_TEMPLATE,
    "Qwen2VL": QWEN_TEMPLATE,
    "Qwen2_5_VL": QWEN_TEMPLATE,
    "Qwen3VL": QWEN_TEMPLATE,
    "Qwen3VLMoe": QWEN_TEMPLATE,
    "Qwen3_5": QWEN_TEMPLATE,
}
_ENDS = ("boi_token", "eoi_token")
_GEMMA3_MARKS = [*(GEMMA3_TOKENS[key] for key in _ENDS), "<start_of_turn>", "<end_of_turn>"]
NEWLINES = ["\n" * count for count in range(2, 8)]
"""One token each, as for Gemma: they join with the ones around a picture."""
_MARKS = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"]
_MARKS += [f"<row_{y}_col_{x}>" for y in range(1, 4) for x in range(1, 4)]
_GEMMA4_MARKS = ["<|image>", "<image|>", "<|turn>", "<turn|>", "<|audio|>", "<|video|>"]
_MISTRAL_MARKS = ["[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"]
_QWEN_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"]


def image_name(name: str) -> str:
    """Returns the text of the placeholder of a model."""
    if name == "Gemma3":
        return GEMMA3_TOKENS["image_token"]
    if name.startswith("Gemma4"):
        return GEMMA4_TOKENS["image"]
    if name == "Mistral3":
        return MISTRAL_IMAGE
    return QWEN_IMAGE if name.startswith("Qwen") else IMAGE


def _marks_of(name: str) -> dict[str, str]:
    """Returns the texts of the tokens whose ids a config has."""
    if name.startswith("Gemma4"):
        others = {"audio_token_id": "<|audio|>", "video_token_id": "<|video|>"}
        return {f"{key}_token_id": text for key, text in GEMMA4_TOKENS.items()} | others
    ends = {f"{key[:3]}_token_index": GEMMA3_TOKENS[key] for key in _ENDS}
    return {"image_token_id": image_name(name)} | (ends if name == "Gemma3" else {})


def save_reader_tokenizer(name: str, folder: Path) -> dict[str, int]:
    """Writes a tokenizer with the tokens of pictures; returns the ids that the config has."""
    backend, image, is_gemma = byte_level(), image_name(name), name == "Gemma3"
    marks = {MISTRAL_IMAGE: _MISTRAL_MARKS, QWEN_IMAGE: _QWEN_MARKS, IMAGE: _MARKS}
    marks[GEMMA4_TOKENS["image"]] = _GEMMA4_MARKS
    texts = [image, *marks.get(image, _GEMMA3_MARKS)]
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in texts])
    if is_gemma:
        backend.add_tokens([AddedToken(each, normalized=False) for each in NEWLINES])
    save_tokenizer(backend, folder, TEMPLATES[name])
    assert backend.get_vocab_size() <= VOCAB
    ids = {name: backend.token_to_id(text) for name, text in _marks_of(name).items()}
    return {name: each for name, each in ids.items() if each is not None}
