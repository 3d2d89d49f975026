"""The steps of `loadout verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadout.client import Client
from loadout.verify.compare import Measured, Positions, Values, measure, num_other_tokens
from loadout.verify.reference import Reference
from loadout.verify.served import Scored, ask

EXACT = "float32"


@dataclass(frozen=True, slots=True)
class VerifiedPrompt:
    """One prompt. Tokens are those of the answer."""

    prompt: str
    tokens: int
    other_tokens: int
    """Not the reference's most likely ones, as rounding explains."""
    wrong_tokens: int
    """Not the reference's most likely ones, as rounding does not explain."""
    measured: Measured


@dataclass(frozen=True, slots=True)
class Verification:
    """The differences of a served adapter from its reference. `fault` is "" if rounding explains
    them."""

    dtype: str
    base: Measured
    adapter: Measured
    prompts: tuple[VerifiedPrompt, ...]
    fault: str


class WrongTokens(Exception):
    """The service tokenizes a prompt differently from the reference's tokenizer."""


@dataclass(slots=True)
class _Answers:
    """A prompt with the answers of the base model and of the adapter; log probabilities of the
    reference at the same positions are added later."""

    prompt: str
    base: Scored
    adapter: Scored
    tokens: tuple[int, ...] = ()
    """The prompt's."""
    exact: dict[str, Values] | None = None
    rounded: dict[str, Values] | None = None

    def of_base(self) -> Positions:
        assert self.exact is not None
        assert self.rounded is not None
        exact = self.exact["base"]
        return Positions(self.base.logprobs, exact, self.rounded["base"], exact)

    def of_adapter(self) -> Positions:
        assert self.exact is not None
        assert self.rounded is not None
        exact, rounded = self.exact["adapter"], self.rounded["adapter"]
        return Positions(self.adapter.logprobs, exact, rounded, self.exact["without"])

    def gaps(self) -> Values:
        """Returns how much more likely the reference's own token is than each of the answer's."""
        assert self.exact is not None
        chosen = self.exact["adapter"][:, 0]
        return (self.exact["best"] - chosen)[len(self.tokens) - 1 :]


def verify(
    client: Client,
    adapter: str,
    folder: Path,
    model: str,
    prompts: Sequence[str],
    max_tokens: int,
    progress: Callable[[str], None],
) -> Verification:
    """Compares a served adapter with PEFT's.

    Args:
        client: Client of the inference service.
        adapter: Reference of the served adapter.
        folder: The trained adapter's folder in PEFT's format.
        model: The base model's folder, its name in the Hub's cache, or a GGUF file.
        prompts: Texts to complete.
        max_tokens: Most tokens per answer.
        progress: Called with a line for each step.

    Raises:
        LoadoutError: The service refuses a request.
        WrongTokens: It tokenizes a prompt differently from the model's tokenizer.
        ImportError: PEFT is not installed.
        BadReference: The reference cannot be computed.
    """
    info = client.server_info()
    dtype, form = info.dtype, info.weight_form
    weights = f" with weights in {form}" if form else ""
    progress(f"asking the service, which computes in {dtype}{weights}")
    asked = [
        _Answers(each, ask(client, "", each, max_tokens), ask(client, adapter, each, max_tokens))
        for each in prompts
    ]
    progress(f"computing the reference in {EXACT}")
    reference = Reference(folder, model, EXACT)
    for each in asked:
        each.tokens = _checked_tokens(reference, each)
        each.exact = _score(reference, each)
    hint = _hint(form, is_quantised=reference.is_quantised)
    if dtype != EXACT:
        progress(f"computing the reference in {dtype}")
        del reference  # before the other one needs memory
        reference = Reference(folder, model, dtype)
    for each in asked:
        each.rounded = each.exact if dtype == EXACT else _score(reference, each)
    return _verification(dtype, asked, hint)


def _checked_tokens(reference: Reference, asked: _Answers) -> tuple[int, ...]:
    tokens = reference.prompt_ids(asked.prompt)
    if asked.adapter.prompt_ids != tokens[1:] or asked.base.prompt_ids != tokens[1:]:
        raise WrongTokens(
            f"the service tokenizes the prompt {asked.prompt!r} differently from the base model's "
            "tokenizer"
        )
    return tokens


def _score(reference: Reference, asked: _Answers) -> dict[str, Values]:
    with_answer = (*asked.tokens, *asked.adapter.answer_ids)
    adapter, best = reference.logprobs(with_answer, asked.adapter.top_ids)
    without, _ = reference.logprobs(with_answer, asked.adapter.top_ids, with_adapter=False)
    with_base_answer = (*asked.tokens, *asked.base.answer_ids)
    base, _ = reference.logprobs(with_base_answer, asked.base.top_ids, with_adapter=False)
    return {"adapter": adapter, "best": best, "without": without, "base": base}


def _verification(dtype: str, asked: Sequence[_Answers], hint: str) -> Verification:
    base = measure([each.of_base() for each in asked])
    adapter = measure([each.of_adapter() for each in asked], base)
    rows = []
    for each in asked:
        near, far = num_other_tokens(each.gaps(), adapter.accepted)
        rows.append(
            VerifiedPrompt(
                each.prompt,
                len(each.adapter.answer_ids),
                near,
                far,
                measure([each.of_adapter()], base),
            )
        )
    wrong = sum(row.wrong_tokens for row in rows)
    fault = _fault(dtype, base, adapter, wrong, hint)
    return Verification(dtype, base, adapter, tuple(rows), fault)


def _hint(form: str, *, is_quantised: bool) -> str:
    """Returns a next step where base models differ. `form` is the form of the service's weights, ""
    for plain ones; the reference's may be quantised, too."""
    if not form:
        plain = "The service holds plain weights: give the plain model with --model"
        return f". {plain}, not one in few bits" if is_quantised else ""
    if not is_quantised:
        return (
            f". The service holds weights in {form}: give the same checkpoint with --model, or "
            "verify with a server of the plain model"
        )
    return (
        f". The service holds weights in {form}. The library that computes the reference may round "
        "them differently: if --model is the same checkpoint, verify with a server of the plain one"
    )


def _fault(dtype: str, base: Measured, adapter: Measured, num_wrong_tokens: int, hint: str) -> str:
    """Returns the reason why the served adapter is not proven to be the reference's, or "". `hint`
    ends the reason that base models differ."""
    if not base.is_equal:
        return (
            "the service runs another base model: without the adapter its log probabilities differ "
            f"by {base.error:.4f}, and rounding explains {base.accepted:.4f}{hint}"
        )
    if not adapter.has_effect:
        return (
            f"nothing is proven: the adapter changes log probabilities by {adapter.effect:.4f}, "
            f"less than rounding in {dtype} can ({adapter.accepted:.4f}). Give prompts from its "
            "training with --prompts"
        )
    if not adapter.is_equal:
        return (
            f"the service applies another adapter: log probabilities differ by {adapter.error:.4f},"
            f" and rounding explains {adapter.accepted:.4f}. The served adapter moves them "
            f"{adapter.scale:.2f} times as far from the base model as the reference"
        )
    if num_wrong_tokens:
        return (
            f"{num_wrong_tokens} tokens are not the reference's, and rounding does not explain it"
        )
    return ""
