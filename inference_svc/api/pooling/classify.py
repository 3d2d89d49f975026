"""A call to classify, independent of its transport: its fields, and the labels of its inputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.pooling.call import PoolCall, pooled_inputs
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.results.base import Kind, Server, of_kind
from inference_svc.results.class_logits import ClassLogits, ClassLogitsOption
from inference_svc.results.classifier_rule import Activation, ClassifierRule
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.prompt import Prompt, Text
from servicekit.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyCall(PoolCall):
    inputs: tuple[Prompt, ...]

    def to_call(self) -> GenerateCall:
        """Raises InvalidArgument naming the field."""
        self._check_count(len(self.inputs))
        for index, each in enumerate(self.inputs):
            self._check_filled(index, bool(each.text if isinstance(each, Text) else each))
        return self._to_call(self.inputs, ClassLogitsOption())


@dataclass(frozen=True, slots=True)
class Classified:
    """The probability of each label of an input, fp32 [labels], and the most probable one, whose
    number is `label_index`."""

    index: int
    label: str
    label_index: int
    probabilities: NDArray[np.float32]
    usage: Usage
    timings: Timings


def check_head(call: GenerateCall, binding: Binding | None, server: Server) -> None:
    """Raises InvalidArgument, naming it, for an adapter without a head of its own on a model that
    has none, and for such a model alone: before anything is computed for the call."""
    rule = server.classifier
    if call.kind is not Kind.CLASSIFY or rule.labels or (binding is not None and binding.has_head):
        return
    subject = "model" if binding is None else "adapter"
    name = server.base_model if binding is None else binding.label
    raise InvalidArgument(
        f"{name} has no classification head: save one with "
        f'modules_to_save=["{rule.head_module}"], or serve a model that has one',
        subject=subject,
    )


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
            best = int(values.argmax())
            label = _label(made, rule, stream.binding, best)
            yield Classified(each.index, label, best, values, each.usage, each.timings)


def _label(made: ClassLogits, rule: ClassifierRule, binding: Binding | None, index: int) -> str:
    """Returns the name of an output: the model's, or, of an adapter's own head, the adapter's, or
    its number if it was registered without names."""
    if not made.is_own:
        return rule.labels[index]
    own = () if binding is None else binding.class_labels
    return own[index] if len(own) == len(made.logits) else f"LABEL_{index}"
