"""The facts about a server that its transports tell, and that calls depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.backends.speed_notes import FormatKernels
from inference_svc.core import NO_DEFAULTS, SamplingDefaults
from inference_svc.host.cpus import Processor
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.results.classifier_rule import NO_CLASSIFIER, ClassifierRule
from inference_svc.results.embedding_rule import NO_EMBEDDINGS, EmbeddingRule
from inference_svc.results.routed_experts import ExpertLayers


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that never change while a server runs."""

    base_model: str
    architecture: str
    dtype: str
    kv_dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    max_sequences: int
    max_batch_tokens: int
    max_queue: int
    lora_targets: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    sampling: SamplingDefaults = NO_DEFAULTS
    metrics_port: int = 0
    has_tokenizer: bool = True
    eos_token_ids: tuple[int, ...] = ()
    experts: ExpertLayers | None = None
    num_threads: int = 0
    processor: Processor | None = None
    speed_notes: tuple[str, ...] = ()
    weight_formats: tuple[FormatKernels, ...] = ()
    adapter_dtype: str = ""
    weight_form: str = ""
    embedding: EmbeddingRule = NO_EMBEDDINGS
    classifier: ClassifierRule = NO_CLASSIFIER
    generates: bool = True
    pictures: PictureRule | None = None
    placeholder_ids: tuple[int, ...] = ()

    @property
    def max_input_tokens(self) -> int:
        """The most tokens of an input to embed."""
        return self.embedding.max_tokens or self.max_model_len

    @property
    def scores_pairs(self) -> bool:
        """Whether the model is a cross-encoder: its head has one output, for a pair of texts."""
        rule = self.classifier
        return len(rule.labels) == 1 and not rule.per_token

    @property
    def expert_token_bytes(self) -> int:
        """The bytes of a token's experts; 0 for a model without experts."""
        return 0 if self.experts is None else self.experts.token_bytes
