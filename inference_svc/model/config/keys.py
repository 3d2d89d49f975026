"""The treatment of every key of config.json.

A key is READ for every family, or read by the family's own module, or IGNORED because it cannot
change a served token (training, file keeping, sampling defaults), or accepted with the values that
the family computes with anyway, or REFUSED by name. Any other key is refused unless its value is
null or false: its meaning is unknown, and a model served with other maths than it was trained with
fails silently. Names that begin with an underscore are transformers' private notes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from inference_svc.errors import UnsupportedModel


def names(*lists: str) -> frozenset[str]:
    return frozenset(" ".join(lists).split())


READ = names(
    """
    architectures dtype torch_dtype
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings
    tie_word_embeddings eos_token_id layer_types
    rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings
    """
)
"""Keys that are read for every family."""

_IGNORED_TRAINING = """
    initializer_range attention_dropout embd_pdrop resid_pdrop use_cache gradient_checkpointing
    chunk_size_feed_forward router_aux_loss_coef pretraining_tp
    unsloth_version unsloth_fixed neftune_noise_alpha
"""
# pretraining_tp only cut the same products into slices that were summed again.

_IGNORED_FILE_KEEPING = """
    model_type transformers_version name_or_path tokenizer_class finetuning_task
    task_specific_params problem_type id2label label2id num_labels prefix
    bos_token_id pad_token_id sep_token_id unk_token_id cls_token_id decoder_start_token_id
    return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss
    matryoshka_dimensions is_matryoshka sentence_transformers sbert_ce_default_activation_function
    is_decoder attn_implementation experts_implementation tie_last_hidden_states
    transformers.js_config
"""

_IGNORED_SAMPLING_DEFAULTS = """
    max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
"""

IGNORED = names(_IGNORED_TRAINING, _IGNORED_FILE_KEEPING, _IGNORED_SAMPLING_DEFAULTS)

REFUSED = {
    "auto_map": "code that comes with a model is not run",
    "per_layer_config": "layers of different shapes are not supported",
    "pruned_heads": "pruned heads are not supported",
    "is_encoder_decoder": "only decoders are supported",
    "add_cross_attention": "only decoders are supported",
    "attn_logit_softcapping": "this family's scores are not bounded",
    "final_logit_softcapping": "this family's logits are not bounded",
}


def check_keys(
    config: Mapping[str, Any],
    family: str,
    reads: Collection[str],
    ignores: Collection[str],
    accepts: Mapping[str, Any],
    where: str = "config.json",
) -> None:
    """Raises UnsupportedModel for keys that are not honoured. `reads` and `ignores` are the
    family's own, in addition to the keys of every family; `accepts` has the one value of a key that
    changes nothing."""
    known = {*READ, *IGNORED, *reads, *ignores}
    refused: dict[str, list[str]] = {}
    for key, value in config.items():
        if key in known or key.startswith("_") or value is None:
            continue
        if key in accepts:
            reason = f"{family} is computed with {accepts[key]!r}"
            is_honoured = value == accepts[key]
        else:
            unknown = f"not known for {family}, and it may change the maths"
            reason = REFUSED.get(key, unknown)
            is_honoured = value is False or value == {}
        if not is_honoured:
            refused.setdefault(reason, []).append(f"{key} = {_shortened(value)}")
    if refused:
        found = (f"{', '.join(keys)}: {reason}" for reason, keys in refused.items())
        raise UnsupportedModel(f"{where}: {'; '.join(found)}")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
