"""Random models with PEFT adapters: on disk as we serve them, in memory as the oracle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.store.cards import copied_cards

VOCAB = 128
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_TYPES = ["sliding_attention", "full_attention"]
_GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 30,
    "sliding_window": 24,
    "layer_types": _TYPES,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_HYBRID = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_TEXT_PARTS = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "lfm2-moe": (
        "Lfm2Moe",
        _EXPERTS
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
    ),
    "qwen3_5": ("Qwen3_5", _HYBRID),
    "qwen3_5-moe": ("Qwen3_5Moe", _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3-next": ("Qwen3Next", _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "gemma2": (
        "Gemma2",
        _GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "Gemma3",
        _GEMMA
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 9e3, "factor": 4.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 5,
            "layer_types": [*_TYPES, "sliding_attention", *_TYPES],
            "sliding_window": 24,
            "head_dim": 24,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 10.0,
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 24,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + n / 4 for n in range(6)],
                "long_factor": [1.0 + n for n in range(6)],
            },
            "original_max_position_embeddings": 1024,
        },
    ),
    "phi3-long": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + n / 4 for n in range(8)],
                "long_factor": [1.0 + n for n in range(8)],
                "attention_factor": 1.1,
            },
            "original_max_position_embeddings": 1,  # longer than that is every context
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"layer_types": _TYPES, "sliding_window": 24}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.6,
            "mlp_bias": True,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": True}),
    "cohere2": (
        "Cohere2",
        {"layer_types": _TYPES, "sliding_window": 24, "logit_scale": 0.5, "attention_bias": True},
    ),
    "exaone4": ("Exaone4", {"layer_types": _TYPES, "sliding_window": 24}),
    "ernie": ("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 5.0,
                "factor": 1.0,
            },
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        _EXPERTS | {"shared_expert_intermediate_size": 40, "tie_word_embeddings": False},
    ),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 48}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "head_dim": 24,
            "sliding_window": 24,
            "layer_types": _TYPES,
            "swiglu_limit": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 24,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            "layer_types": _TYPES,
            "sliding_window": 24,
            "head_dim": 24,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
}
_PHI3 = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_NO_DENSE = {"gate_proj": "q_proj", "up_proj": "k_proj", "down_proj": "o_proj"}
"""Stands in for linear layers that models of experts do not have, or that PEFT takes for theirs."""
_LFM2 = {"o_proj": "out_proj", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FUSED: dict[str, dict[str, str]] = {
    "phi3": _PHI3,
    "phi3-long": _PHI3,
    "glm4": dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    "lfm2": _LFM2,
    "lfm2-moe": _LFM2,
    **dict.fromkeys(
        ("qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "gpt-oss", "glm4-moe", "qwen3-next"),
        _NO_DENSE,
    ),
}
"""Modules that a model has in place of others."""
_DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
MORE: dict[str, list[str]] = {
    "lfm2": ["in_proj"],
    "lfm2-moe": ["in_proj"],
    "qwen3_5": _DELTA,
    "qwen3_5-moe": [*_DELTA, "shared_expert_gate"],
    "qwen3-next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"],
    "gemma4": ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"],
    "qwen2-moe": ["shared_expert_gate"],
    "gemma4-moe": ["proj"],
}
"""Linear layers that a model has beside them."""


def modules_of(kind: str) -> list[str]:
    """Returns the names of all linear layers of a model but for its head."""
    names = dict.fromkeys(FUSED.get(kind, {}).get(each, each) for each in ALL)
    return [*names, *MORE.get(kind, [])]


@dataclass(frozen=True)
class AdapterSpec:
    """A random PEFT adapter: `options` go to LoraConfig."""

    name: str
    rank: int
    targets: Sequence[str] | str
    options: dict[str, Any] = field(default_factory=dict)


SPECS = (
    AdapterSpec("r1", 1, ["q_proj", "v_proj"]),
    AdapterSpec("r3", 3, ALL, {"use_rslora": True}),
    AdapterSpec("r8", 8, ["down_proj"], {"layers_to_transform": [1]}),
    AdapterSpec("r16", 16, ALL),
    AdapterSpec("r33", 33, ["o_proj", "gate_proj", "k_proj"], {"rank_pattern": {"k_proj": 5}}),
    AdapterSpec(
        "r64", 64, ["q_proj", "up_proj", "down_proj"], {"alpha_pattern": {"layers.1.mlp.*": 200}}
    ),
    AdapterSpec("embed", 4, ["embed_tokens", "lm_head", "o_proj"]),
)

_EXPERTS_OF_MLP = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_WITH_GATE = (*_EXPERTS_OF_MLP, "mlp.gate.weight")
PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "glm4-moe", "qwen3_5-moe"),
            "qwen3-next",
        ),
        _WITH_GATE,
    ),
    "gpt-oss": (*_EXPERTS_OF_MLP, "mlp.router.weight"),
    "gemma4-moe": ("experts.gate_up_proj", "experts.down_proj"),
    "lfm2-moe": tuple(
        f"feed_forward.{each}"
        for each in ("experts.gate_up_proj", "experts.down_proj", "gate.weight")
    ),
}
"""The parameters of experts and routers of a model; PEFT wants all adapters to change the same."""


def specs_of(kind: str) -> Sequence[AdapterSpec]:
    """Returns adapters of a model: of its experts, too, if it has any."""
    if kind not in PARAMETERS:
        return SPECS
    experts = {"target_parameters": list(PARAMETERS[kind])}
    attention, ranks = ["q_proj", "k_proj", "v_proj", "o_proj"], {"experts.down_proj": 5}
    return (
        AdapterSpec("r1", 1, ["q_proj", "v_proj"]),
        AdapterSpec("r3", 3, attention, experts | {"use_rslora": True}),
        AdapterSpec("r8", 8, [], experts | {"rank_pattern": ranks}),
        AdapterSpec("r16", 16, attention, experts),
        AdapterSpec("r33", 33, ["o_proj", "k_proj"], {"rank_pattern": {"k_proj": 5}}),
        AdapterSpec("r64", 64, ["q_proj"], experts | {"alpha_pattern": {"experts.down_proj": 99}}),
        AdapterSpec("embed", 4, ["embed_tokens", "lm_head", "o_proj"]),
    )


@dataclass
class Zoo:
    """One random model with its adapters, in the form of transformers + peft and on disk."""

    kind: str
    model_dir: Path
    reference: Any
    adapter_dirs: dict[str, Path]
    copies: dict[torch.dtype, Any] = field(default_factory=dict, init=False, repr=False)
    """Of the reference, in other dtypes."""
    answers: dict[tuple[str, tuple[int, ...]], list[int]] = field(
        default_factory=dict, init=False, repr=False
    )
    """The longest greedy answer so far, by adapter and prompt: many tests ask the same."""
    states: dict[tuple[str, tuple[int, ...]], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    """Hidden states so far, by adapter and prompt."""

    def logits(self, adapter: str, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
        """[len(token_ids), vocab] of the oracle; adapter "" is the base model."""
        model = self.reference
        if dtype != torch.float32:
            if dtype not in self.copies:
                self.copies[dtype] = copy.deepcopy(model).to(dtype)
            model = self.copies[dtype]
        with torch.no_grad():
            if adapter:
                model.set_adapter(adapter)
                out = model(torch.tensor([token_ids]))
            else:
                with model.disable_adapter():
                    out = model(torch.tensor([token_ids]))
        return out.logits[0].float()

    def hidden(self, adapter: str, token_ids: list[int]) -> torch.Tensor:
        """Returns [len(token_ids), hidden_size] of the oracle behind its last norm, in fp32."""
        key = adapter, tuple(token_ids)
        if key not in self.states:
            self.states[key] = self.hidden_and_logits(adapter, token_ids)[0]
        return self.states[key]

    def hidden_and_logits(
        self, adapter: str, token_ids: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [len(token_ids), hidden_size] behind the last norm, and [len(token_ids), vocab]:
        both of one pass of the oracle, in fp32."""
        model = self.reference
        inputs = {"input_ids": torch.tensor([token_ids]), "output_hidden_states": True}
        with torch.no_grad():
            if adapter:
                model.set_adapter(adapter)
                out = model(**inputs)
            else:
                with model.disable_adapter():
                    out = model(**inputs)
        return out.hidden_states[-1][0], out.logits[0]

    def greedy(
        self, adapter: str, prompt: list[int], count: int, guess: Sequence[int] = ()
    ) -> list[int]:
        """Returns the oracle's next tokens, in fp32, past any end token. A right guess takes one
        step: the oracle chooses each of its tokens after the ones before it."""
        key = adapter, tuple(prompt)
        if len(self.answers.get(key, ())) < count:
            self.answers[key] = self._generated(adapter, prompt, count, guess)
        return self.answers[key][:count]

    def _generated(
        self, adapter: str, prompt: list[int], count: int, guess: Sequence[int]
    ) -> list[int]:
        if len(guess) == count:
            logits = self.logits(adapter, [*prompt, *guess[:-1]], torch.float32)
            if logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == list(guess):
                return list(guess)
        model = self.reference
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            if adapter:
                model.set_adapter(adapter)
                out = model.generate(input_ids=torch.tensor([prompt]), **options)
            else:
                with model.disable_adapter():
                    out = model.generate(input_ids=torch.tensor([prompt]), **options)
        found: list[int] = out[0, len(prompt) :].tolist()
        return found


def make_zoo(kind: str, folder: Path, specs: Sequence[AdapterSpec] = ()) -> Zoo:
    specs = specs or specs_of(kind)
    model = make_model(kind, folder / "model")
    reference = adapted(model, kind, folder / "adapters", specs)
    dirs = {spec.name: folder / "adapters" / spec.name for spec in specs}
    return Zoo(kind, folder / "model", reference, dirs)


def make_model(kind: str, folder: Path, **changes: Any) -> Any:
    """Returns a random model, which is saved with a tokenizer. `changes` are of its config."""
    prefix, options = MODELS[kind]
    torch.manual_seed(7)
    name = f"{prefix}TextConfig" if prefix in _TEXT_PARTS else f"{prefix}Config"
    config = getattr(transformers, name)(**(_SHAPE | options | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    shake_norms_and_biases(model)
    model.generation_config.eos_token_id = 2
    model.name_or_path = model.config.name_or_path = kind
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def adapted(
    model: Any,
    kind: str,
    folder: Path,
    specs: Sequence[AdapterSpec],
    train: Callable[[Any], None] | None = None,
    *,
    save_embedding_layers: bool = False,
) -> Any:
    """Returns the model with random adapters, which are saved in folders of their names."""
    reference: Any = None
    names = FUSED.get(kind, {})
    for spec in specs:
        targets = modules_of(kind) if spec.targets is ALL else _targets(spec.targets, names)
        lora = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=2 * spec.rank,
            target_modules=targets,
            base_model_name_or_path=kind,
            **_renamed(spec.options, names),
        )
        with quiet():
            if reference is None:
                reference = peft.get_peft_model(model, lora, adapter_name=spec.name)
            else:
                reference.add_adapter(spec.name, lora)
    for name, parameter in reference.named_parameters():
        if (
            "lora_" in name and parameter.dim() > 1
        ):  # so that a change is about 0.04 per weight, whatever the rank
            torch.nn.init.normal_(parameter, std=0.14 / min(parameter.shape) ** 0.25)
    if train is not None:
        with torch.no_grad():
            train(reference)
    with quiet(), copied_cards():
        reference.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return reference.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what PEFT warns of without need."""
    with warnings.catch_warnings():
        # Advice about merging into tied embeddings, and what it does when it merges.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed")
        # They match parameters.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        # A bias of B has one dimension, which PEFT takes for a shard.
        warnings.filterwarnings("ignore", "Adapter .*invalid shape")
        yield


def _targets(targets: Sequence[str] | str, names: dict[str, str]) -> list[str] | str:
    if isinstance(targets, str):
        return targets
    return list(dict.fromkeys(names.get(each, each) for each in targets))


def _renamed(options: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns the options with patterns of ranks by these names."""
    patterns = {names.get(key, key): rank for key, rank in options.get("rank_pattern", {}).items()}
    return options | ({"rank_pattern": patterns} if patterns else {})


def shake_norms_and_biases(model: torch.nn.Module) -> None:
    """Initialisation leaves them at one and zero, which would hide a missing one."""
    is_gemma4 = getattr(model.config, "model_type", "") in ("gemma4", "gemma4_text")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.2)
        if name.endswith("q_norm.weight") and is_gemma4:
            parameter.data *= 0.25  # nothing else scales its scores
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
        elif name.endswith("expert_bias"):
            buffer.normal_(std=0.2)


def save_tokenizer(folder: Path) -> None:
    """One token per printable ASCII character, from 3 on; others are unknown."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(i): i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
