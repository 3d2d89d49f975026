"""The names of tensors and modules in a whole checkpoint, of which the text part is served."""

from __future__ import annotations

from typing import NamedTuple


class Wrapper(NamedTuple):
    """How a whole checkpoint, of a model of several towers, names the tensors of its text part:
    `prefixes` and their replacements; and `others`, the towers that are not served. Where a name of
    theirs begins with one of two `tower_prefixes`, it may begin with the other."""

    prefixes: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()
    tower_prefixes: tuple[tuple[str, str], ...] = ()

    @property
    def has_own_names(self) -> bool:
        """Whether the text part has another name than "language_model", which stores know."""
        prefixes = [prefix for prefix, _ in self.prefixes] if self.others else []
        return bool(prefixes) and not any("language_model" in prefix for prefix in prefixes)

    def text_name(self, stored: str) -> str | None:
        """Returns the name of a tensor as a model of text alone has it; None for one of another
        tower."""
        for prefix, meant in self.prefixes:
            if stored.startswith(prefix):
                return meant + stored.removeprefix(prefix)
        return None if self.tower_of(stored) in self.others else stored

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Returns the further names that a module of the text part may have in the whole."""
        return tuple(each for each in self.whole_names(name) if each != name)

    def whole_names(self, name: str) -> tuple[str, ...]:
        """Returns all names that a module may have in the whole."""
        path = f"{name}."
        found = (each for each in self.prefixes if path.startswith(each[1]))
        longest = sorted(found, key=lambda each: len(each[1]), reverse=True)
        return tuple(
            (prefix + path.removeprefix(meant)).removesuffix(".")
            for prefix, meant in longest
            if len(meant) == len(longest[0][1])
        )

    def tower_of(self, stored: str) -> str:
        """Returns the first component of a name below the whole, which of another tower is the
        tower's."""
        return stored.removeprefix("model.").partition(".")[0]

    def tower_names(self, stored: str) -> tuple[str, ...]:
        """Returns the names that a module of another tower goes by, of the newest transformers
        first."""
        name = stored.removeprefix("model.")
        found = [name]
        for pair in self.tower_prefixes:
            # The longer one first: the other is how it begins.
            before = next((each for each in pair if name.startswith(each)), None)
            if before is not None:
                found = [each + name.removeprefix(before) for each in reversed(pair)]
        return tuple(prefix + each for each in found for prefix in ("model.", ""))


TEXT_ALONE = Wrapper()
HEADED = "model."
"""The first component of names in a model that has a head, but for the head's own."""
BARE = Wrapper(prefixes=((HEADED, HEADED), ("lm_head.", "lm_head."), ("", HEADED)))
"""A checkpoint of the class without a head, such as embedding models have: the names of its tensors
lack the first component."""
