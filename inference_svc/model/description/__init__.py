"""A decoder as data: all that decides a model's maths and shapes.

`model.architectures` makes a `Decoder` of config.json. Everything else that knows a model walks it:
to place the checkpoint's tensors, to list the targets of adapters, to count the memory of steps,
and to compute in each backend. Modules are named as in Hugging Face's models: a layer's below the
layer ("self_attn.q_proj"), the others below the whole ("model.norm").

modules       norms and linear layers
mixers        attention and recurrences
feed_forward  dense halves and mixtures of experts
encoder       attention in both directions, and the inputs of encoders
tower         the inputs of vision towers, and connectors
decoder       layers, and the whole
"""

from inference_svc.model.description.decoder import (
    Block,
    Decoder,
    Head,
    LayerInputs,
    Pictures,
    Rank,
    Stage,
)
from inference_svc.model.description.encoder import BothWays, EncoderHead, EncoderInputs, Positions
from inference_svc.model.description.feed_forward import (
    Activation,
    ClampedSwiglu,
    Dense,
    Experts,
    LayerInput,
    Router,
)
from inference_svc.model.description.mixers import (
    Attention,
    KVPlace,
    KVShape,
    QueryGrowth,
    Recurrence,
)
from inference_svc.model.description.modules import (
    EMBED_TOKENS,
    LAYER_INPUTS,
    LM_HEAD,
    SCORE,
    Cut,
    ExpertsProjection,
    Member,
    Norm,
    NormKind,
    Projection,
    WeightPart,
    layer_path,
)
from inference_svc.model.description.tower import Connector, Patches, Standard, Tap
from kernels.pictures.reference import Merging

__all__ = [
    "EMBED_TOKENS",
    "LAYER_INPUTS",
    "LM_HEAD",
    "SCORE",
    "Activation",
    "Attention",
    "Block",
    "BothWays",
    "ClampedSwiglu",
    "Connector",
    "Cut",
    "Decoder",
    "Dense",
    "EncoderHead",
    "EncoderInputs",
    "Experts",
    "ExpertsProjection",
    "Head",
    "KVPlace",
    "KVShape",
    "LayerInput",
    "LayerInputs",
    "Member",
    "Merging",
    "Norm",
    "NormKind",
    "Patches",
    "Pictures",
    "Positions",
    "Projection",
    "QueryGrowth",
    "Rank",
    "Recurrence",
    "Router",
    "Stage",
    "Standard",
    "Tap",
    "WeightPart",
    "layer_path",
]
