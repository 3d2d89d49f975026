"""Layers, and the decoder that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from inference_svc.model.checkpoint.wrapper import TEXT_ALONE, Wrapper
from inference_svc.model.description.encoder import BothWays, EncoderInputs
from inference_svc.model.description.feed_forward import Dense, Experts, LayerInput
from inference_svc.model.description.mixers import (
    Attention,
    KVPlace,
    KVShape,
    QueryGrowth,
    Recurrence,
)
from inference_svc.model.description.modules import Cut, Norm, Projection
from inference_svc.model.description.tower import Connector, Patches, Tap
from inference_svc.model.quantised.scheme import Scheme
from inference_svc.model.rope import Axes, Rope
from inference_svc.pictures.positions import PicturePositions
from inference_svc.pictures.processor import Processor
from inference_svc.pictures.prompt import Frame
from inference_svc.pictures.sizes import TileForm
from inference_svc.pictures.units import SHARE_PAIRS, TowerUnits
from inference_svc.results.routed_experts import ExpertLayers
from kernels.quantised import WeightFormat


@dataclass(frozen=True, slots=True)
class Block:
    """A layer: a mixer of tokens, then the feed-forward half; each reads the norm of the residual
    stream, or the stream itself, and adds to it, normed or not, times `residual_scale`. A
    `layer_input`, if there is one, reads the stream itself, and adds to it last.

    With an `attention_sum_norm` or a `feed_forward_sum_norm` the stream goes on with the norm of
    what that half makes of it (Vaswani et al., 2017). `is_parallel`: both halves read the output of
    `attention_norm`. `scalar` is the module whose number the stream is multiplied by at the end.
    The checkpoint may have modules that are `unused`.
    """

    mixer: Attention | Recurrence | BothWays
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
    attention_sum_norm: Norm | None = None
    feed_forward_sum_norm: Norm | None = None

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
    the projection makes them. Of the tokens `of_padding`, (token, padding), it has padding's row.
    """

    embedding: str
    vocab_size: int
    size: int
    projection: Projection
    norm: Norm
    embedding_scale: float
    projection_scale: float
    scale: float
    of_padding: tuple[tuple[int, int], ...] = ()

    @property
    def total_size(self) -> int:
        """Elements of all layers together."""
        return self.projection.out_features


@dataclass(frozen=True, slots=True)
class Head:
    """Logits: the embedding's weight if tied, else `lm_head`'s; times `scale`, bounded by
    `softcap` as attention's scores. `format` is of the head's weight: a tied head may
    have few bits, and the embedding not."""

    is_tied: bool
    scale: float = 1.0
    softcap: float | None = None
    format: WeightFormat | None = None

    @property
    def is_shared(self) -> bool:
        """Whether its weight is the embedding's table."""
        return self.is_tied and self.format is None


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count` processes that compute a model together, each with a part of its weights."""

    index: int
    count: int

    def part_size(self, whole: int) -> int:
        """Returns the most features of a rank, of so many."""
        return -(-whole // self.count)

    def part(self, whole: int) -> Cut:
        """Returns this rank's features; the last rank may have fewer than others."""
        size = self.part_size(whole)
        start = self.index * size
        return Cut(start, min(start + size, whole), whole)


@dataclass(frozen=True, slots=True)
class Stage:
    """One of several parts of a model's layers, which compute one after the other. `ends` are the
    layers that end each stage; the first has the embedding, and the last one the head."""

    index: int
    ends: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.ends)

    @property
    def layers(self) -> range:
        return range(self.ends[self.index - 1] if self.index else 0, self.ends[self.index])

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True)
class Decoder:
    """The computation of one model.

    `dtype` is the type that its weights were saved in, by torch's name; `config_sha256` the hex
    digest of config.json as canonical JSON: keys sorted, no spaces. Embeddings are multiplied by
    `embedding_scale`, rounded to their dtype. The checkpoint may have `num_unused_layers` behind
    the last. `quantisation` says how the checkpoint has the weights that have a format. `rank` is
    the rank whose part this is, as `model.sharding` makes it, and `stage` the stage, of which
    operations, weights and states are; None: of the whole model. `blocks` are those of all stages.
    It `generates` unless its class has no head, or another one: a classifier has a head of its own,
    whose outputs have the names `labels`, for each token if it `labels_tokens`.

    With an `encoder` it is no decoder: its tokens see each other in both directions, so that it
    never generates and has no state. It has no logits; the outputs of a step are hidden states, of
    the last norm if there is one. An encoder of `patches` is a vision tower, whose outputs a
    `connector` makes embeddings of, and `taps` of some layers. `pictures` says how a prompt's
    pictures are computed. Tokens with `placeholder_ids` stand for pictures, sounds and videos, and
    are no words.
    """

    architecture: str
    config_sha256: str
    dtype: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    head: Head
    embedding_scale: float = 1.0
    layer_inputs: LayerInputs | None = None
    eos_token_ids: tuple[int, ...] = ()
    wrapper: Wrapper = TEXT_ALONE
    num_unused_layers: int = 0
    quantisation: Scheme | None = field(default=None, compare=False)
    rank: Rank | None = None
    stage: Stage | None = None
    generates: bool = True
    labels: tuple[str, ...] = ()
    labels_tokens: bool = False
    encoder: EncoderInputs | None = None
    patches: Patches | None = None
    connector: Connector | None = None
    taps: tuple[Tap, ...] = ()
    pictures: Pictures | None = None
    placeholder_ids: tuple[int, ...] = ()

    @property
    def towers(self) -> tuple[Decoder, ...]:
        """The vision tower, if it reads pictures: whole, whichever rank has it."""
        return () if self.pictures is None else (self.pictures.tower,)

    @property
    def num_outputs(self) -> int:
        """The numbers of a step's outputs for each row: logits, or hidden states."""
        return self.vocab_size if self.encoder is None else self.hidden_size

    @property
    def num_layers(self) -> int:
        """The layers of all stages."""
        return len(self.blocks)

    @property
    def layers(self) -> range:
        """The layers that are here."""
        return range(self.num_layers) if self.stage is None else self.stage.layers

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding is here."""
        return self.stage is None or self.stage.is_first

    @property
    def has_head(self) -> bool:
        """Whether the last norm and the head are here."""
        return self.stage is None or self.stage.is_last

    @property
    def is_first_rank(self) -> bool:
        """Whether it is a stage's first rank, which has the logits of all."""
        return self.rank is None or self.rank.index == 0

    @property
    def num_world_ranks(self) -> int:
        """The ranks of all stages."""
        num_ranks = 1 if self.rank is None else self.rank.count
        return num_ranks if self.stage is None else num_ranks * self.stage.count

    @cached_property
    def every_stage(self) -> tuple[Decoder, ...]:
        """The parts of all stages; a model that has none is one."""
        if self.stage is None:
            return (self,)
        stages = (replace(self.stage, index=index) for index in range(self.stage.count))
        return tuple(replace(self, stage=stage) for stage in stages)

    @cached_property
    def of_all_stages(self) -> Decoder:
        """All layers, of the same rank."""
        return self if self.stage is None else replace(self, stage=None)

    @cached_property
    def attention_of(self) -> Mapping[int, Attention]:
        """The attention of each layer here that has one."""
        mixers = ((layer, self.blocks[layer].mixer) for layer in self.layers)
        return {layer: mixer for layer, mixer in mixers if isinstance(mixer, Attention)}

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(self.attention_of.values())

    @cached_property
    def recurrences(self) -> Mapping[int, Recurrence]:
        """The recurrence of each layer here that has one."""
        mixers = ((layer, self.blocks[layer].mixer) for layer in self.layers)
        return {layer: mixer for layer, mixer in mixers if isinstance(mixer, Recurrence)}

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The distinct rotations, with the size of the heads that they turn."""
        mixers = (self.blocks[layer].mixer for layer in self.layers)
        turned = (each for each in mixers if isinstance(each, Attention | BothWays))
        found = ((each.rope, each.head_dim) for each in turned if each.rope is not None)
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
        """The size of the widest dense half of all stages; 0 if there are none."""
        return max((each.dense.size for each in self.blocks if each.dense is not None), default=0)

    @cached_property
    def mixtures(self) -> tuple[Experts, ...]:
        """The mixtures of experts, of the layers of all stages that have one."""
        return tuple(each.experts for each in self.blocks if each.experts is not None)

    @cached_property
    def expert_layers(self) -> ExpertLayers | None:
        """The layers of all stages that are mixtures, which are all alike; None if there are
        none."""
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

    @property
    def kv_vectors_per_token(self) -> int:
        """Heads of keys and of values of all layers that have their own."""
        return sum(2 * each.num_kv_heads for each in self.attentions if each.kv_layer is None)

    def for_length(self, max_model_len: int) -> Decoder:
        """Returns the decoder for sequences up to this length, by which some rotations are
        chosen."""
        return self.with_ropes(lambda rope: rope.for_length(max_model_len))

    def with_ropes(self, change: Callable[[Rope], Rope]) -> Decoder:
        """Returns the decoder with other rotations of its attention."""

        def changed(block: Block) -> Block:
            mixer = block.mixer
            if not isinstance(mixer, Attention) or mixer.rope is None:
                return block
            return replace(block, mixer=replace(mixer, rope=change(mixer.rope)))

        return replace(self, blocks=tuple(map(changed, self.blocks)))


@dataclass(frozen=True)
class Pictures:
    """How a decoder reads pictures: `tower` makes the embeddings of the tokens `token_id`, which
    stand for a picture in a prompt, of the tiles that the `processor` makes of it. `facts` are this
    processor's, once its file is read. If tokens have several positions, these turn the pairs of
    heads along `axes`. The tokens of a picture see each other in both directions if they
    `are_mutual`; then they are neighbours. A prompt may have a `frame` around them, or a mark
    behind each row of them if it `has_rows`. Where layers have inputs of their own, these have the
    ones of the token `padding_id`."""

    tower: Decoder
    token_id: int
    axes: Axes | None = None
    facts: Processor | None = None
    are_mutual: bool = False
    frame: Frame | None = None
    has_rows: bool = False
    padding_id: int | None = None

    @property
    def processor(self) -> Processor:
        assert self.facts is not None, "its file is read"
        return self.facts

    @property
    def size(self) -> int:
        """The elements of an embedding."""
        assert self.tower.connector is not None
        return self.tower.connector.layers[-1].out_features

    @property
    def tiles(self) -> TileForm:
        """The form of the tower's tiles."""
        assert self.tower.patches is not None
        return self.tower.patches.form

    def units(self, num_threads: int | None) -> TowerUnits:
        """Returns the units of the tower's work, if so many threads compute it. None: a device
        does, of which a strip's attention takes a small part: by heads it would take no less
        time."""
        mixers = [each.mixer for each in self.tower.blocks if isinstance(each.mixer, BothWays)]
        sees_all = tuple(not each.in_windows for each in mixers)
        num_heads = max(each.num_heads for each in mixers)
        if num_threads is None:
            return TowerUnits(self.tiles, sees_all, num_heads, None)
        return TowerUnits(self.tiles, sees_all, num_heads, SHARE_PAIRS, num_threads)

    @property
    def positions(self) -> PicturePositions | None:
        """The positions of pictures, if their rows and columns count; None: tokens have one
        position."""
        return None if self.axes is None else PicturePositions(self.tiles)

    @property
    def row_size(self) -> int:
        """The elements of all embeddings of a token, the ones of taps too."""
        return (1 + len(self.tower.taps)) * self.size

    def max_inner_tokens(self, max_model_len: int) -> int:
        """Returns the most tokens of a tile in the tower, of prompts that are no longer than this:
        longer ones are refused."""
        form = self.tiles
        if form.tile_size:
            return form.inner_tokens(form.whole)
        most = self.processor.max_tile_pixels // form.patch_size**2
        return min(most, max_model_len * form.merge**2)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a prompt that stand for a picture."""
        processor = self.processor
        return processor.max_tiles * self.tiles.max_tokens(processor.max_tile_pixels)
