"""A call to classify, independent of its transport: its fields, and the labels of its inputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.pooling.call import PoolCall, of_tokens, pooled_inputs
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.results.base import FP32_BYTES, Server, Wanted, of_kind
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from inference_svc.results.classifier_rule import MAX_LABELS, Activation, ClassifierRule
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.cut import NO_LIMIT
from inference_svc.text.pair import Pair
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyCall(PoolCall):
    """`per_token` None: whichever the model's class labels, inputs or each of their tokens."""

    inputs: tuple[Prompt, ...]
    per_token: bool | None = None

    def to_call(self, rule: ClassifierRule) -> GenerateCall:
        """Returns the call of a server that classifies by this rule. Raises InvalidArgument naming
        the field."""
        self._check_count(len(self.inputs))
        for index, each in enumerate(self.inputs):
            self._check_filled(index, _is_filled(each))
        per_token = rule.per_token if self.per_token is None else self.per_token
        # An adapter may have a head of its own.
        num_labels = MAX_LABELS if self.adapter or self.parts else len(rule.labels) or MAX_LABELS
        token_bytes = FP32_BYTES * num_labels if per_token else 0
        option = ClassLogitsOption(per_token=self.per_token)
        return self._to_call(self.inputs, option, NO_LIMIT, token_bytes)


@dataclass(frozen=True, slots=True)
class Classified:
    """The probability of each of the `labels` of an input, fp32 [labels], and the number of the
    most probable one."""

    index: int
    labels: tuple[str, ...]
    label_index: int
    probabilities: NDArray[np.float32]
    usage: Usage
    timings: Timings

    @property
    def label(self) -> str:
        return self.labels[self.label_index]


@dataclass(frozen=True, slots=True)
class ClassifiedTokens:
    """The probability of each label of each token of an input, fp32 [tokens, labels], and the names
    of the labels."""

    index: int
    labels: tuple[str, ...]
    probabilities: NDArray[np.float32]
    usage: Usage
    timings: Timings


def with_head(call: GenerateCall, binding: Binding | None, server: Server) -> GenerateCall:
    """Returns a call that classifies with the number of labels that its head has. Raises
    InvalidArgument, naming it, for an adapter without a head of its own on a model that has none,
    and for such a model alone: before anything is computed for the call."""
    rule, option = server.classifier, call.wanted.get(ClassLogitsOption)
    if option is None:
        return call
    if binding is not None and binding.has_head:
        # Heads of a sum may differ. One that was registered without names has any number.
        own = 0 if binding.parts else len(binding.class_labels)
        if option.is_score and own:
            check_one_output(binding.label, own, "adapter")
        num_labels = max(own or MAX_LABELS, len(rule.labels))
        return replace(call, wanted=Wanted((replace(option, num_labels=num_labels),)))
    if rule.labels:
        if option.is_score:
            check_one_output(server.base_model, len(rule.labels), "model")
        option = replace(option, num_labels=len(rule.labels))
        return replace(call, wanted=Wanted((option,)))
    subject = "model" if binding is None else "adapter"
    name = server.base_model if binding is None else binding.label
    raise InvalidArgument(
        f"{name} has no classification head: save one with "
        f'modules_to_save=["{rule.head_module}"], or serve a model that has one',
        subject=subject,
    )


def check_one_output(name: str, num_outputs: int, subject: str) -> None:
    """Raises InvalidArgument for a model or adapter whose head has no single output to score
    with."""
    if num_outputs != 1:
        raise InvalidArgument(
            f"{name} does not score: its head has {num_outputs} labels, and a score is a head's "
            "only output: classify with it, or score with an adapter whose own head has one",
            subject=subject,
        )


def _is_filled(given: Prompt) -> bool:
    if isinstance(given, Pair):
        return bool(given.first and given.second)
    return bool(given.text if isinstance(given, Text) else given)


async def classes(
    stream: GenerateStream, rule: ClassifierRule, *, is_raw: bool = False
) -> AsyncGenerator[Classified, None]:
    """Yields the labels of each input as they are there, in any order; if they are to be `raw`, the
    head's outputs in place of probabilities. Raises like `pooled_inputs`."""
    async with aclosing(pooled_inputs(stream)) as found:
        async for each in found:
            [made] = of_kind(each.parts, ClassLogits)
            logits = made.logits
            activation = Activation.NONE if is_raw else rule.activation_of(len(logits))
            values = activation(logits)
            labels = _labels(made.is_own, len(logits), rule, stream.binding)
            best = int(values.argmax())
            yield Classified(each.index, labels, best, values, each.usage, each.timings)


async def token_classes(
    stream: GenerateStream, rule: ClassifierRule, *, is_raw: bool = False
) -> AsyncGenerator[ClassifiedTokens, None]:
    """Yields the labels of all tokens of each input as they are there, as `classes` does."""
    async with aclosing(pooled_inputs(stream)) as found:
        async for each in found:
            is_own = of_kind(each.parts, ClassLogits)[0].is_own
            blocks = [part.rows for part in of_kind(each.parts, ClassLogits)]
            num_labels = blocks[0].shape[1]
            activation = Activation.NONE if is_raw else rule.activation_of(num_labels)
            values = await of_tokens(blocks, activation)
            blocks.clear()
            each.parts.clear()  # their memory is counted for the values, until they are read
            labels = _labels(is_own, num_labels, rule, stream.binding)
            yield ClassifiedTokens(each.index, labels, values, each.usage, each.timings)


def labels_tokens(call: GenerateCall) -> bool:
    """Returns whether a call that classifies has labels of each token."""
    option = call.wanted.get(ClassLogitsOption)
    return option is not None and bool(option.per_token)


def _labels(
    is_own: bool, count: int, rule: ClassifierRule, binding: Binding | None
) -> tuple[str, ...]:
    """Returns the names of a head's outputs: the model's, or, of an adapter's own head, the
    adapter's, or numbers if it was registered without names."""
    if not is_own:
        return rule.labels
    own = () if binding is None else binding.class_labels
    return own if len(own) == count else tuple(f"LABEL_{index}" for index in range(count))
