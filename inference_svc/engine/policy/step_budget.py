"""How many tokens of each running sequence a step computes, within the step's budget.

Tenants whose prompts are computed get equal parts of the budget that generated tokens leave; a part
that one does not need goes to the others. Prompts that are computed anew for a newer version of an
adapter come after all others. Costs are in tokens of a prompt: see `prices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from inference_svc.core import Sequence
from inference_svc.engine.policy.prices import Prices

CHOICES_SHARE = 0.5
"""Share of a step that choosing tokens may cost, beyond the tokens themselves; at least one row's.
Tenants that get least have waited longest, and are the first in the next step."""
ANEW_SHARE = 1 / 8
"""Share of a step that is kept for recomputation, however many other prompts there are."""
ANEW_BESIDE_SHARE = 1 / 32
"""Largest share of a step for recomputation while other tenants generate, because each of their
tokens waits for the end of a step. It is as much as the recomputed sequences would generate on a
CPU, and next to nothing on a GPU."""


@dataclass(slots=True)
class Grants:
    """`tokens` of sequences, by their id(); `left` is the rest of the budget, `anew_left` of the
    part for recomputation while other tenants are `generating`. A sequence that starts gets all of
    its prompt if it `computes_whole` prompts."""

    left: float
    max_chunk: int
    prices: Prices
    anew_left: float = 0.0
    generating: set[str] = field(default_factory=set)
    computes_whole: bool = False
    tokens: dict[int, int] = field(default_factory=dict)

    def of(self, sequence: Sequence) -> int:
        return self.tokens.get(id(sequence), 0)

    def give(self, sequence: Sequence, budget: float) -> float:
        """Grants as many more tokens of a prompt as the budget allows; returns their cost."""
        before = self.of(sequence)
        count = self._affordable(sequence, budget, before)
        if count <= 0:
            return 0.0
        self.tokens[id(sequence)] = before + count
        return self._pay(sequence, count)

    def give_at_once(self, sequence: Sequence) -> None:
        """Grants all tokens that are computed in one step, whatever the budget."""
        self.tokens[id(sequence)] = sequence.num_at_once
        self._pay(sequence, sequence.num_at_once)

    def start(self, sequence: Sequence) -> int:
        """Grants the rest to a sequence that starts; returns how many tokens, at least one."""
        if self.computes_whole:
            count = sequence.num_uncomputed
        else:
            count = max(1, self._affordable(sequence, self.left, 0))
        self._pay(sequence, count)
        return count

    def _affordable(self, sequence: Sequence, budget: float, before: int) -> int:
        if self._waits_for_others(sequence):
            budget = min(budget, self.anew_left)
        most = min(sequence.num_uncomputed, self.max_chunk) - before
        count = min(most, int(budget / self.prices.of_prompt(sequence)))
        is_useless = sequence.awaits_picture or before + count < sequence.num_at_once
        return 0 if is_useless else count

    def _pay(self, sequence: Sequence, count: int) -> float:
        cost = count * self.prices.of_prompt(sequence)
        self.left -= cost
        if self._waits_for_others(sequence):
            self.anew_left -= cost
        return cost

    def _waits_for_others(self, sequence: Sequence) -> bool:
        return sequence.is_computed_anew and bool(self.generating - {sequence.request.tenant})


@dataclass(slots=True)
class Turns:
    """The turns of tenants at tokens that are computed at once, whose part of the budget may always
    be too small for them. Beside generated tokens a step has room for one such sequence, which may
    leave nothing to others: so every second step is for the others' prompts."""

    _number: int = 0
    _last: dict[str, int] = field(default_factory=dict)
    _was_used: bool = False

    def next(self, prompts: list[Sequence]) -> Sequence | None:
        """Returns the sequence that gets all these tokens in this step: the first in rank of the
        tenant that has waited longest; None: there is none, or the step is for others."""
        able = [each for each in prompts if not each.awaits_picture]
        waiting = [each for each in able if each.num_at_once]
        tenants = {each.request.tenant for each in waiting}
        has_others = any(each.request.tenant not in tenants for each in able)
        if not waiting or (self._was_used and has_others):
            self._was_used = False
            return None
        self._last = {name: turn for name, turn in self._last.items() if name in tenants}
        found = min(waiting, key=lambda each: self._last.get(each.request.tenant, 0))
        self._number += 1
        self._last[found.request.tenant], self._was_used = self._number, True
        return found


def share_step(
    running: Iterable[Sequence],
    budget: int,
    max_chunk: int,
    waiting_tokens: int,
    prices: Prices,
    turns: Turns | None = None,
) -> Grants:
    """Grants every generated token, then tokens of prompts. `running` is in order of rank. For
    waiting sequences, of so many tokens, up to a quarter of the budget for prompts stays.
    `turns` are of the steps before."""
    generating: list[Sequence] = []
    prompts: list[Sequence] = []
    for sequence in running:
        (generating if sequence.num_uncomputed == 1 else prompts).append(sequence)
    tenants = {sequence.request.tenant for sequence in generating}
    anew_most = max(1.0, ANEW_BESIDE_SHARE * budget)
    grants = Grants(float(budget), max_chunk, prices, anew_most, tenants)
    _grant_choices(grants, generating, budget)
    if prompts:
        if (at_once := (turns or Turns()).next(prompts)) is not None:
            grants.give_at_once(at_once)
        kept = min(max(0.0, grants.left) // 4, waiting_tokens)
        grants.left -= kept
        _grant_prompts(grants, prompts)
        grants.left += kept
    return grants


def _grant_choices(grants: Grants, generating: list[Sequence], budget: int) -> None:
    """Each generated token is granted unless choosing it has a price: those take turns."""
    priced: dict[str, list[tuple[float, float, Sequence]]] = {}
    for sequence in generating:
        price = grants.prices.of_choice(sequence)
        if price:
            last_s = sequence.last_token_s or sequence.request.arrival_s
            priced.setdefault(sequence.request.tenant, []).append((last_s, price, sequence))
            continue
        grants.tokens[id(sequence)] = 1
        grants.left -= 1
    if not priced:
        return
    turns = [sorted(each, key=lambda waiting: waiting[0]) for each in priced.values()]
    turns.sort(key=lambda waiting: waiting[0][0])
    left = share = CHOICES_SHARE * budget
    for _, price, sequence in _in_turns(turns):
        if left < price and left < CHOICES_SHARE * budget:
            return
        left -= price
        grants.tokens[id(sequence)] = 1
        # A token that costs more than the budget makes the step longer: a prompt's token is left.
        charge = max(0.0, min(price, share, grants.left - 2))
        share -= charge
        grants.left -= 1 + charge


def _in_turns(
    lists: list[list[tuple[float, float, Sequence]]],
) -> Iterator[tuple[float, float, Sequence]]:
    """Yields the first of each list, then the second of each, and so on."""
    return (each for each in chain.from_iterable(zip_longest(*lists)) if each is not None)


def _grant_prompts(grants: Grants, prompts: list[Sequence]) -> None:
    first, anew = (
        _by_tenant(s for s in prompts if not s.is_computed_anew),
        [sequence for sequence in prompts if sequence.is_computed_anew],
    )
    kept = ANEW_SHARE * grants.left if anew else 0.0
    grants.left -= kept
    _grant_equally(grants, first)
    grants.left += kept
    _grant_equally(grants, _by_tenant(anew))
    if not any(grants.of(sequence) for sequence in prompts) and grants.left >= 1:
        # Scoring one token may cost more than a step has: then it has that alone.
        first_able = next((each for each in prompts if not each.awaits_picture), prompts[0])
        grants.tokens[id(first_able)] = 1
        grants.left -= grants.prices.of_prompt(first_able)


def _by_tenant(prompts: Iterable[Sequence]) -> list[list[Sequence]]:
    found: dict[str, list[Sequence]] = {}
    for sequence in prompts:
        found.setdefault(sequence.request.tenant, []).append(sequence)
    return list(found.values())


def _grant_equally(grants: Grants, tenants: list[list[Sequence]]) -> None:
    """Gives each tenant its part, those first that need the least, and then the rest."""
    prices = grants.prices
    tenants = sorted(
        tenants,
        key=lambda prompts: sum(s.num_uncomputed * prices.of_prompt(s) for s in prompts),
    )
    for index, prompts in enumerate(tenants):
        _grant_in_tenant(grants, prompts, grants.left / (len(tenants) - index))
    for sequence in chain.from_iterable(tenants):
        grants.give(sequence, grants.left)


def _grant_in_tenant(grants: Grants, prompts: list[Sequence], budget: float) -> None:
    """The first in rank gets up to half, so that it always progresses; then the shortest go first,
    so that no prompt waits for the end of a much longer one."""
    first, *others = prompts
    budget -= grants.give(first, -(-budget // 2))
    for sequence in sorted(others, key=lambda sequence: sequence.num_uncomputed):
        budget -= grants.give(sequence, budget)
    grants.give(first, budget)
