"""The supported architectures, one row each, and the treatment of every key of config.json.

A Llama-like architecture is added by a row in `ARCHITECTURES` (and one in `test_parity.py`, which
compares its logits with those of transformers).

A key of config.json is READ by `geometry`, or IGNORED because it cannot change a served token
(training, file keeping, sampling defaults), or REFUSED by name. Any other key is refused unless its
value is null or false: its meaning is unknown, and a model served with other maths than it was
trained with fails silently. Names that begin with an underscore are transformers' private notes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_svc.errors import UnsupportedModel


class SlidingWindow(enum.Enum):
    """The layers that attend only to a window of positions; values are the config keys read.

    EVERY_LAYER: all, if `sliding_window` is not null. SOME_LAYERS: if `use_sliding_window`, those
    that `layer_types` names, or else those from `max_window_layers` on.
    """

    # Sets: Python 3.11.2, Debian's, makes an object() of a member whose value is an empty tuple.
    NO_LAYER = frozenset[str]()
    EVERY_LAYER = frozenset({"sliding_window"})
    SOME_LAYERS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences of an architecture from Llama's decoder without biases.

    `qkv_bias`, `o_bias` and `mlp_bias` are True, False, or the key of config.json that decides.
    `qk_norm`: queries and keys are normalised per head. `defaults` are what transformers assumes
    for keys that config.json leaves out, where that differs from `DEFAULTS`.
    """

    name: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    sliding_window: SlidingWindow = SlidingWindow.NO_LAYER
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of config.json that are read for this architecture, in addition to `READ`."""
        flags = (self.qkv_bias, self.o_bias, self.mlp_bias)
        return frozenset((*(f for f in flags if isinstance(f, str)), *self.sliding_window.value))


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
"""Values that transformers assumes for keys that config.json leaves out, unless an architecture's
`defaults` differ. A bias that is left out is absent."""

_QWEN_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture(
            "LlamaForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Architecture(
            "MistralForCausalLM",
            sliding_window=SlidingWindow.EVERY_LAYER,
            defaults={
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
            },
        ),
        Architecture(
            "Qwen2ForCausalLM",
            qkv_bias=True,
            sliding_window=SlidingWindow.SOME_LAYERS,
            defaults=_QWEN_DEFAULTS,
        ),
        Architecture(
            "Qwen3ForCausalLM",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            sliding_window=SlidingWindow.SOME_LAYERS,
            defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        ),
    )
}


def _names(*lists: str) -> frozenset[str]:
    return frozenset(" ".join(lists).split())


READ = _names(
    """
    architectures dtype torch_dtype
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings
    tie_word_embeddings eos_token_id layer_types
    rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings
    """
)
"""Keys that are read for every architecture."""

_IGNORED_TRAINING = """
    initializer_range attention_dropout embd_pdrop resid_pdrop use_cache gradient_checkpointing
    chunk_size_feed_forward router_aux_loss_coef pretraining_tp
    unsloth_version unsloth_fixed
"""
# pretraining_tp only cut the same products into slices that were summed again.

_IGNORED_FILE_KEEPING = """
    model_type transformers_version name_or_path tokenizer_class finetuning_task
    task_specific_params problem_type id2label label2id num_labels prefix
    bos_token_id pad_token_id sep_token_id unk_token_id cls_token_id decoder_start_token_id
    return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss
    is_decoder attn_implementation experts_implementation tie_last_hidden_states
"""

_IGNORED_SAMPLING_DEFAULTS = """
    max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
"""

IGNORED = _names(_IGNORED_TRAINING, _IGNORED_FILE_KEEPING, _IGNORED_SAMPLING_DEFAULTS)

REFUSED = {
    "quantization_config": "quantised weights are not supported",
    "compression_config": "quantised weights are not supported",
    "auto_map": "code that comes with a model is not run",
    "per_layer_config": "layers of different shapes are not supported",
    "pruned_heads": "pruned heads are not supported",
    "is_encoder_decoder": "only decoders are supported",
    "add_cross_attention": "only decoders are supported",
    "attn_logit_softcapping": "softcapping is not supported",
    "final_logit_softcapping": "softcapping is not supported",
}


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """Returns the row that `architectures` names.

    Raises UnsupportedModel if there is none, or for a key of `config` that is not honoured.
    """
    names = config.get("architectures") or []
    architecture = next((row for name, row in ARCHITECTURES.items() if names == [name]), None)
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"config.json: architectures = {names!r}: supported is one of {supported}"
        )
    known = READ | architecture.keys | IGNORED
    for key, value in config.items():
        if key in known or key.startswith("_") or value is None or value is False or value == {}:
            continue
        unknown = f"not known for {architecture.name}, and it may change the maths"
        reason = REFUSED.get(key, unknown)
        raise UnsupportedModel(f"config.json: {key} = {_shortened(value)}: {reason}")
    return architecture


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
