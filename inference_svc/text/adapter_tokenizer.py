"""A model's tokenizer with the tokens that an adapter adds to it, and with its chat template.

The `tokenizers` library gives each backend its own added tokens around a model that they share: so
an adapter takes the memory of its tokens, and not of a vocabulary.

Changes of a text's tokens are refused by name: the tokens of the model keep their ids, and
everything else that the adapter's files say is compared by hash with the model's files, or with the
files that transformers makes of them, which some releases save in their place.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.tokenizer_extract import (
    MODEL_PARTS,
    PIPELINE,
    PROMPT_SETTINGS,
    SETTINGS,
    AddedToken,
    InvalidTokenizer,
    TokenizerExtract,
    hash_component,
    make_extract,
    show,
)
from inference_svc.errors import TokenizerChanged
from inference_svc.text.answers.families import AnswerSyntax
from inference_svc.text.chat import Chat
from inference_svc.text.chat_template import Renderer
from inference_svc.text.pair import PairTokens
from inference_svc.text.pieces import Pieces
from inference_svc.text.template_process import TemplateProcesses
from inference_svc.text.tokenizer import (
    BackendText,
    Tokenizer,
    make_template,
    max_chars_per_token,
)

MAX_NEW_BYTES = 96 << 10
"""The size that the texts of an adapter's added tokens may have together, in UTF-8, as the model's
normalizer makes them. The `tokenizers` library builds automata of them and of the model's own, and
holds Python's interpreter meanwhile: up to a microsecond a byte. It cannot do so in steps."""
AUTOMATON_BYTES = 64
"""The memory of the automata of added tokens for each byte of their texts, as measured with
tokenizers 0.23: 15 of long tokens, 61 of single characters."""

_WORDS = {
    "vocabulary": "the vocabulary",
    "merges": "the merges",
    "model": "the settings of the model",
    "normalizer": "the normalizer",
    "pre_tokenizer": "the pre-tokenizer",
    "decoder": "the decoder",
    "post_processor": "the post-processor",
}


class BaseTokenizer:
    """A model's tokenizer, as adapters' are compared with it. `extract` is of the model's files;
    None: they cannot be read as such, and no adapter's tokenizer is used."""

    def __init__(self, text: Tokenizer, model_dir: Path) -> None:
        self.text = text
        self.extract = _read_extract(text, model_dir)
        self.digest = "" if self.extract is None else self.extract.digest
        self.loaded_parts = {name: _loaded_part(text.backend, name) for name in PIPELINE}
        tokens = text.backend.get_added_tokens_decoder()
        self.tokens = {
            token.content: _to_added(token_id, token) for token_id, token in sorted(tokens.items())
        }
        self._is_set = {
            name: bool(getattr(text.hf, name, None) or text.hf.init_kwargs.get(name))
            for name in SETTINGS
        }

    def with_adapter(
        self,
        extract: TokenizerExtract | None,
        template: str,
        processes: TemplateProcesses,
    ) -> AdapterText:
        """Returns the text of an adapter with this tokenizer (None: the model's) and chat template
        ("": the model's).

        Raises TokenizerChanged, naming the token, the part, or the limit."""
        base = self.text
        if extract is None:
            return self._text(base.backend, (), base.specials, template, processes)
        new = self._check(extract)
        backend, num_bytes = self._build(new) if new else (base.backend, 0)
        given = {**base.specials, **extract.roles}
        specials = {role: token for role, token in given.items() if token is not None}
        end_ids: tuple[int, ...] = ()
        eos = specials.get("eos_token")
        if eos is not None and eos != base.specials.get("eos_token"):
            eos_id = backend.token_to_id(eos)
            end_ids = () if eos_id is None else (eos_id,)
        text = self._text(backend, new, specials, template, processes, end_ids)
        text.prompt_refusal = self._prompt_refusal(extract)
        text.automaton_bytes = num_bytes
        return text

    def _text(
        self,
        backend: Any,
        new: Sequence[AddedToken],
        specials: Mapping[str, str],
        template: str,
        processes: TemplateProcesses,
        end_ids: tuple[int, ...] = (),
    ) -> AdapterText:
        base = self.text
        renderer: Renderer | None = base.template
        if template:
            renderer = _ChildTemplate(template, dict(specials), processes)
        elif renderer is not None and specials != base.specials:
            renderer = make_template(base.hf, specials)
        num_chars = base.max_chars_per_token
        if new:
            num_chars = max(num_chars, max_chars_per_token((each.content for each in new), backend))
        text = AdapterText(
            backend,
            _VisibleIds(base.visible_ids, new) if new else base.visible_ids,
            base.byte_ids,
            num_chars,
            specials,
            renderer,
            end_ids,
            self._answers(template),
        )
        text.pieces = Pieces(text, base.pieces, frozenset(each.id for each in new))
        text.has_types = base.has_types
        return text

    def _answers(self, template: str) -> AnswerSyntax:
        """Returns how answers under an adapter's template are read: as it teaches, or the model's
        parser where it teaches no calls."""
        base = self.text
        if not template:
            return base.answers
        own = AnswerSyntax.of(template, "none" if base.tool_parser == "none" else "auto")
        if own.calls is None and base.tool_parser != "auto":
            return AnswerSyntax.of(template, base.tool_parser)
        return own

    def _check(self, extract: TokenizerExtract) -> list[AddedToken]:
        """Returns the tokens that are new. Raises TokenizerChanged."""
        if self.extract is None:
            raise TokenizerChanged(
                "the adapter brings a tokenizer, and this server's model has no tokenizer.json to "
                "compare it with; register the adapter without its tokenizer's files",
                subject="tokenizer.json",
            )
        for part in (*MODEL_PARTS, *PIPELINE):
            known = {self.extract.parts.get(part), self.loaded_parts.get(part)}
            if part != "post_processor" and extract.parts.get(part) not in known:
                raise _changed(f"{_WORDS[part]} of the model", part)
        for name in SETTINGS:
            if name not in PROMPT_SETTINGS and self._differs(extract, name):
                raise _changed(f"{name} of tokenizer_config.json", name)
        return list(self._new_tokens(extract))

    def _new_tokens(self, extract: TokenizerExtract) -> Iterator[AddedToken]:
        assert self.extract is not None
        found = {each.content: each for each in extract.added_tokens}
        in_files = {each.content: each for each in self.extract.added_tokens}
        for content, token in self.tokens.items():
            own = found.pop(content, None)
            if own is None and content not in in_files:
                continue  # transformers adds it by itself where there is none
            if own is None:
                raise _changed(f"token {show(content)} of the model, which it lacks", content)
            if own.id != token.id:
                detail = f"token {show(content)} of the model: its id is {own.id}, not {token.id}"
                raise _changed(detail, content)
            if own not in (token, in_files.get(content)):
                raise _changed(f"how token {show(content)} of the model is found", content)
        backend = self.text.backend
        for content, own in found.items():
            taken, known_id = backend.id_to_token(own.id), backend.token_to_id(content)
            if known_id is not None and known_id != own.id:
                detail = f"token {show(content)} of the model: its id is {own.id}, not {known_id}"
                raise _changed(detail, content)
            if taken is not None and taken != content:
                raise _changed(f"id {own.id} of the model's token {show(taken)}", content)
            yield own

    def _build(self, new: Sequence[AddedToken]) -> tuple[Any, int]:
        """Returns the backend, and about the bytes that it takes beside the model's. Raises
        TokenizerChanged."""
        import tokenizers

        num_bytes = self._num_bytes(new)
        if num_bytes > MAX_NEW_BYTES:
            raise TokenizerChanged(
                f"the {len(new)} tokens that the adapter's tokenizer adds have {num_bytes} bytes "
                f"of text, more than {MAX_NEW_BYTES}: add fewer tokens, or shorter ones",
                subject="tokenizer.json",
            )

        base = self.text.backend
        backend = tokenizers.Tokenizer(base.model)
        for part in PIPELINE:
            if getattr(base, part) is not None:
                setattr(backend, part, getattr(base, part))
        backend.encode_special_tokens = base.encode_special_tokens
        tokens = sorted([*self.tokens.values(), *new], key=lambda each: each.id)
        backend.add_tokens([_from_added(each) for each in tokens])
        for each in tokens:
            if (found := backend.token_to_id(each.content)) != each.id:
                raise TokenizerChanged(
                    f"the adapter's tokenizer gives token {show(each.content)} the id {each.id}, "
                    f"where the tokenizers library gives it {found}: ids of added tokens follow "
                    "one another",
                    subject=show(each.content),
                )
        return backend, AUTOMATON_BYTES * (num_bytes + self._num_bytes(self.tokens.values()))

    def _num_bytes(self, tokens: Iterable[AddedToken]) -> int:
        """Returns the bytes of their texts in which they are looked for."""
        normalizer = self.text.backend.normalizer
        return sum(
            len(each.content.encode())
            if normalizer is None or not each.normalized
            else len(normalizer.normalize_str(each.content).encode())
            for each in tokens
        )

    def _prompt_refusal(self, extract: TokenizerExtract) -> str:
        """Returns the changes of text prompts, not of chats, in words; "" for none."""
        assert self.extract is not None
        known = {self.extract.parts["post_processor"], self.loaded_parts["post_processor"]}
        if extract.parts["post_processor"] not in known:
            return _WORDS["post_processor"]
        for name in PROMPT_SETTINGS:
            role = name.removeprefix("add_")
            if self._differs(extract, name):
                return f"{name} of tokenizer_config.json"
            own, base = extract.roles.get(role), self.text.specials.get(role)
            if self._is_set[name] and role in extract.roles and own != base:
                return f"{role}, with which texts begin or end"
        return ""

    def _differs(self, extract: TokenizerExtract, name: str) -> bool:
        if name not in extract.settings:
            return False
        assert self.extract is not None
        in_files = self.extract.settings.get(name, self._is_set[name])
        return extract.settings[name] not in (in_files, self._is_set[name])


class AdapterText(BackendText):
    """`prompt_refusal` names the changes of text prompts, "" for none; `automaton_bytes` is the
    memory of its added tokens, 0 where they are the model's."""

    prompt_refusal = ""
    automaton_bytes = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises TokenizerChanged where texts would begin or end otherwise than the model's do."""
        if add_special_tokens:
            self._check_prompts()
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> PairTokens:
        """Raises TokenizerChanged as `encode`."""
        self._check_prompts()
        return super().encode_pair(first, second)

    def _check_prompts(self) -> None:
        if self.prompt_refusal:
            raise TokenizerChanged(
                f"the adapter's tokenizer changes {self.prompt_refusal}: send a chat or token ids, "
                "or register the adapter without its tokenizer's files",
                subject="tokenizer.json",
            )


@dataclass(frozen=True, slots=True)
class _ChildTemplate:
    """An adapter's chat template."""

    source: str
    specials: Mapping[str, str]
    processes: TemplateProcesses

    def render(self, chat: Chat, max_chars: int, max_seconds: float) -> str:
        """See Renderer, and TemplateProcesses.render."""
        return self.processes.render(self.source, self.specials, chat, max_chars, max_seconds)


class _VisibleIds:
    """A model's visible tokens, and of the new ones those without a special meaning."""

    def __init__(self, of_base: Container[int], new: Sequence[AddedToken]) -> None:
        self._of_base = of_base
        self._new = {each.id: not each.special for each in new}

    def __contains__(self, token_id: object) -> bool:
        found = self._new.get(token_id) if isinstance(token_id, int) else None
        return token_id in self._of_base if found is None else found


def _read_extract(text: Tokenizer, model_dir: Path) -> TokenizerExtract | None:
    """Reads the model's files, or, without tokenizer.json, the library's form of a tokenizer made
    of other files."""
    try:
        path = model_dir / "tokenizer.json"
        tokenizer = json.loads(path.read_bytes() if path.exists() else text.backend.to_str())
        config = _read(model_dir / "tokenizer_config.json") or {}
        return make_extract(tokenizer, config, _read(model_dir / "special_tokens_map.json"))
    except (InvalidTokenizer, OSError, ValueError):
        return None


def _read(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.exists() else None


def _loaded_part(backend: Any, name: str) -> str:
    component = getattr(backend, name)
    return hash_component(name, None if component is None else json.loads(component.__getstate__()))


def _to_added(token_id: int, token: Any) -> AddedToken:
    names = ("special", "normalized", "lstrip", "rstrip", "single_word")
    return AddedToken(token_id, token.content, **{name: getattr(token, name) for name in names})


def _from_added(token: AddedToken) -> Any:
    import tokenizers

    return tokenizers.AddedToken(
        token.content,
        special=token.special,
        normalized=token.normalized,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )


def _changed(what: str, subject: str) -> TokenizerChanged:
    return TokenizerChanged(
        f"the adapter's tokenizer changes {what}, but an adapter may only add tokens. To serve it "
        "with the model's tokenizer, register it without its tokenizer's files",
        subject=show(subject),
    )
