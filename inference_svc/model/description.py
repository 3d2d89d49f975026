"""A decoder as data: all that decides a model's maths and shapes.

`model.architectures` makes a `Decoder` of config.json. Everything else that knows a model walks it:
to place the checkpoint's tensors, to list the targets of adapters, to count the memory of steps,
and to compute in each backend. Modules are named as in Hugging Face's models: a layer's below the
layer ("self_attn.q_proj"), the others below the whole ("model.norm").
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from inference_svc.model.checkpoint.wrapper import TEXT_ALONE, Wrapper
from inference_svc.model.rope import Rope
from inference_svc.results.routed_experts import ExpertLayers
from kernels.experts import Choice, padded_rows

EMBED_TOKENS, LM_HEAD, LAYER_INPUTS = "model.embed_tokens", "lm_head", "layer_inputs"
"""Modules, and the name of the projection of `LayerInputs`."""


def layer_path(layer: int, module: str) -> str:
    """Returns the path of a layer's module, such as "model.layers.3.self_attn.q_proj"."""
    return f"model.layers.{layer}.{module}"


class NormKind(enum.Enum):
    """RMS: x / sqrt(mean(x^2) + eps). LAYER: the same of x - mean(x)."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over `size` elements, times its weight plus `weight_offset`; without a `module` the
    weight is 1.

    Where it `is_wide` the weight is in fp32, and the product is rounded; else the norm is rounded
    to the model's dtype before the product. `tensor` is the name of its weight in the checkpoint
    where that is not "weight" of the module; then adapters do not have it. The weight is multiplied
    by `weight_scale`.
    """

    module: str
    size: int
    eps: float
    kind: NormKind = NormKind.RMS
    weight_offset: float = 0.0
    is_wide: bool = False
    tensor: str = ""
    weight_scale: float = 1.0

    def path(self, layer: int | None) -> str:
        """Returns the path of its module, of a layer or, None, of the whole."""
        return self.module if layer is None else layer_path(layer, self.module)


class Member(NamedTuple):
    """A linear layer and its number of outputs; `others` are further names of the module."""

    module: str
    out_features: int
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers that read the same input, computed as one, their outputs side by side.

    `name` is such as "qkv". `fused` is the module that computes all of them where they are one: the
    checkpoint has that instead of its members if it `is_stored_fused`.
    """

    name: str
    members: tuple[Member, ...]
    in_features: int
    has_bias: bool = False
    fused: str = ""
    is_stored_fused: bool = False

    @property
    def out_features(self) -> int:
        return sum(member.out_features for member in self.members)

    @property
    def num_rows(self) -> int:
        """The rows of its weight."""
        return self.out_features

    @property
    def stored(self) -> tuple[Member, ...]:
        """The modules whose weights the checkpoint has, in the order of their outputs."""
        return (Member(self.fused, self.out_features),) if self.is_stored_fused else self.members


@dataclass(frozen=True, slots=True)
class ExpertsProjection:
    """Linear layers of every expert that read the same input, computed as one. `members` name the
    layers of all experts, such as "mlp.experts.gate_proj": one expert's in the checkpoint is
    "mlp.experts.3.gate_proj".

    `parameter` is the one tensor that a checkpoint may have of all experts and members,
    [experts, out, in], or [experts, in, out] if it `is_transposed`; outputs of the members take
    turns if it `is_interleaved`, else they lie one behind the other. `parameter`_bias is its bias,
    [experts, out].
    """

    name: str
    members: tuple[Member, ...]
    in_features: int
    num_experts: int
    parameter: str
    has_bias: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False

    @property
    def out_features(self) -> int:
        """The outputs of one expert."""
        return sum(member.out_features for member in self.members)

    @property
    def num_rows(self) -> int:
        """The rows of its weight, in which experts lie below each other."""
        return self.num_experts * padded_rows(self.out_features)


class QueryGrowth(NamedTuple):
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / length)) (Llama 4)."""

    beta: float
    length: int


class KVShape(NamedTuple):
    """The keys of one token in one layer; its values have the same shape."""

    num_kv_heads: int
    head_dim: int


class KVPlace(NamedTuple):
    """Where a layer's keys and values are: in the cache of the shape with this index, whose layer
    this is."""

    shape: int
    layer: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of `num_heads` queries in groups, which share keys and values.

    `scale` multiplies scores, which are bounded by `softcap`: cap * tanh(score / cap). `window` is
    how many positions a query attends to, its own included; None: all. `rope` None: positions do
    not enter. Norms are over a head, or, as their size says, over all heads; before the rotation,
    or behind it if `norms_rotated`. `kv_layer` is the layer whose keys and values it reads, None:
    its own. Where `values_are_keys`, values are the keys before their norm and rotation. `sinks` is
    the tensor with a number for each head: a score without a value, which takes part in the
    softmax. If it `has_gate`, `qkv` also makes gates, whose sigmoids multiply the heads' outputs.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv: Projection
    out: Projection
    rope: Rope | None
    window: int | None = None
    softcap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norms_rotated: bool = False
    kv_layer: int | None = None
    values_are_keys: bool = False
    query_growth: QueryGrowth | None = None
    sinks: str = ""
    has_gate: bool = False

    def __post_init__(self) -> None:
        norms = (self.q_norm, self.k_norm, self.v_norm)
        assert len({norm.eps for norm in norms if norm is not None}) <= 1, "they are one operation"

    @property
    def norms_all_heads(self) -> bool:
        """Whether a norm of queries or keys is over all heads at once."""
        norms = (self.q_norm, self.k_norm)
        return any(norm is not None and norm.size != self.head_dim for norm in norms)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A mixer that folds all tokens before into a state of a fixed size; each kind is a subclass,
    which `walk.MIXERS` lists the operations of. `out` is its last projection."""

    out: Projection

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts of a sequence's state in one layer, in fp32."""
        raise NotImplementedError


class Activation(enum.Enum):
    """By the names of config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(gate) * up)."""

    activation: Activation
    gate_up: Projection
    down: Projection

    @property
    def size(self) -> int:
        return self.down.in_features


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit`, and up between -limit and
    limit (GPT-OSS)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of a token by logits, which the projection makes of the half's input, or
    of the norm of the residual stream. `bias` is the tensor that is added to scores to choose by,
    `expert_scales` the tensor that weights are multiplied by; both have a number for each
    expert."""

    projection: Projection
    choice: Choice
    norm: Norm | None = None
    bias: str = ""
    expert_scales: str = ""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: the sum of the outputs of a token's experts, each down(activation(gate)
    * up), weighed as the router says, and of the part that all share: a dense half, times
    sigmoid(shared_gate) if there is such a gate.

    With a `norm` experts read the norm of the residual stream, and not the dense half's input. The
    outputs of both have post-norms of their own.
    """

    router: Router
    activation: Activation | ClampedSwiglu
    gate_up: ExpertsProjection
    down: ExpertsProjection
    shared: Dense | None = None
    shared_gate: Projection | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    shared_post_norm: Norm | None = None

    def __post_init__(self) -> None:
        assert self.shared is not None or self.shared_gate is None
        assert (self.norm is None) == (self.router.norm is None)
        assert (self.post_norm is None) == (self.shared_post_norm is None)

    @property
    def num_experts(self) -> int:
        return self.gate_up.num_experts

    @property
    def num_chosen(self) -> int:
        return self.router.choice.num_chosen

    @property
    def size(self) -> int:
        """The size of one expert."""
        return self.down.in_features


@dataclass(frozen=True, slots=True)
class LayerInput:
    """out(activation(gate(x)) * e), e being the layer's part of the output of `LayerInputs`."""

    activation: Activation
    gate: Projection
    out: Projection


@dataclass(frozen=True, slots=True)
class Block:
    """A layer: a mixer of tokens, then the feed-forward half; each reads the norm of the residual
    stream, or the stream itself, and adds to it, normed or not, times `residual_scale`. A
    `layer_input`, if there is one, reads the stream itself, and adds to it last.

    `is_parallel`: both halves read the output of `attention_norm`. `scalar` is the module whose
    number the stream is multiplied by at the end. The checkpoint may have modules that are
    `unused`.
    """

    mixer: Attention | Recurrence
    feed_forward: Dense | Experts
    attention_norm: Norm | None
    feed_forward_norm: Norm | None
    attention_post_norm: Norm | None = None
    feed_forward_post_norm: Norm | None = None
    layer_input: LayerInput | None = None
    layer_input_post_norm: Norm | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0
    scalar: str = ""
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.is_parallel:
            assert self.attention_norm is not None
            assert self.feed_forward_norm is None
            assert isinstance(self.feed_forward, Dense)

    @property
    def experts(self) -> Experts | None:
        """The mixture that its feed-forward half is, if it is one."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    @property
    def dense(self) -> Dense | None:
        """The half that every token passes through, of a mixture the half that all share."""
        half = self.feed_forward
        return half if isinstance(half, Dense) else half.shared


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The per-layer inputs: for each token `size` elements for every layer (Gemma 3n):

    scale * (norm(projection_scale * projection(x)) + embedding_scale * embedding[token]), where x
    is the scaled embedding. The table of embeddings has the parts of all layers side by side, as
    the projection makes them.
    """

    embedding: str
    vocab_size: int
    size: int
    projection: Projection
    norm: Norm
    embedding_scale: float
    projection_scale: float
    scale: float

    @property
    def total_size(self) -> int:
        """Elements of all layers together."""
        return self.projection.out_features


@dataclass(frozen=True, slots=True)
class Head:
    """Logits: the embedding's weight if tied, else `lm_head`'s; times `scale`, bounded by
    `softcap` as attention's scores."""

    is_tied: bool
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Decoder:
    """The computation of one model.

    `dtype` is the type that its weights were saved in, by torch's name; `config_sha256` the hex
    digest of config.json as canonical JSON: keys sorted, no spaces. Embeddings are multiplied by
    `embedding_scale`, rounded to their dtype. The checkpoint may have `num_unused_layers` behind
    the last.
    """

    architecture: str
    config_sha256: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: Head
    embedding_scale: float = 1.0
    layer_inputs: LayerInputs | None = None
    eos_token_ids: tuple[int, ...] = ()
    wrapper: Wrapper = TEXT_ALONE
    num_unused_layers: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def attention_of(self) -> Mapping[int, Attention]:
        """The attention of each layer that has one."""
        mixers = ((layer, block.mixer) for layer, block in enumerate(self.blocks))
        return {layer: mixer for layer, mixer in mixers if isinstance(mixer, Attention)}

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(self.attention_of.values())

    @cached_property
    def recurrences(self) -> Mapping[int, Recurrence]:
        """The recurrence of each layer that has one."""
        mixers = ((layer, block.mixer) for layer, block in enumerate(self.blocks))
        return {layer: mixer for layer, mixer in mixers if isinstance(mixer, Recurrence)}

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The distinct rotations, with the size of the heads that they turn."""
        found = ((each.rope, each.head_dim) for each in self.attentions if each.rope is not None)
        return tuple(dict.fromkeys(found))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows."""
        return tuple(dict.fromkeys(each.window for each in self.attentions))

    @property
    def query_growths(self) -> tuple[QueryGrowth, ...]:
        """The distinct ways in which queries grow with their positions."""
        found = (each.query_growth for each in self.attentions)
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    def max_intermediate_size(self) -> int:
        """The size of the widest dense half; 0 if there are none."""
        return max((each.dense.size for each in self.blocks if each.dense is not None), default=0)

    @cached_property
    def mixtures(self) -> tuple[Experts, ...]:
        """The mixtures of experts, of the layers that have one."""
        return tuple(each.experts for each in self.blocks if each.experts is not None)

    @cached_property
    def expert_layers(self) -> ExpertLayers | None:
        """The layers that are mixtures, which are all alike; None if there are none."""
        layers = tuple(i for i, each in enumerate(self.blocks) if each.experts is not None)
        if not layers:
            return None
        shapes = {(each.num_experts, each.num_chosen) for each in self.mixtures}
        assert len(shapes) == 1, f"a model whose mixtures differ: {sorted(shapes)}"
        return ExpertLayers(layers, *shapes.pop())

    @cached_property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """The distinct shapes of keys and values."""
        return tuple(dict.fromkeys(each.kv_shape for each in self.attentions))

    @cached_property
    def kv_places(self) -> Mapping[int, KVPlace]:
        """Where the keys and values are of each layer that has some."""
        places: dict[int, KVPlace] = {}
        for layer, each in self.attention_of.items():
            if each.kv_layer is not None:
                places[layer] = places[each.kv_layer]
                continue
            shape = self.kv_shapes.index(each.kv_shape)
            before = {place for place in places.values() if place.shape == shape}
            places[layer] = KVPlace(shape, len(before))
        return places

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of all layers that have their own."""
        return sum(2 * each.kv_size for each in self.attentions if each.kv_layer is None)

    def for_length(self, max_model_len: int) -> Decoder:
        """Returns the decoder for sequences up to this length, by which some rotations are
        chosen."""

        def chosen(block: Block) -> Block:
            mixer = block.mixer
            if not isinstance(mixer, Attention) or mixer.rope is None:
                return block
            return replace(block, mixer=replace(mixer, rope=mixer.rope.for_length(max_model_len)))

        return replace(self, blocks=tuple(map(chosen, self.blocks)))
