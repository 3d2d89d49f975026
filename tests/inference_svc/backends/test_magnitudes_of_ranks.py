"""Magnitudes where a model is cut: ranks exchange the squares of norms once for each adapter, at
the same time, and an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from contract.images.dtypes import DataType
from contract.images.header import ImageHeader, Segment
from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import EMBEDDING, HEAD, IMAGE_FORMATS, ModelLayout
from inference_svc.adapters.memory.image_slots import Slots
from inference_svc.backends import magnitudes
from inference_svc.backends.arena import Arena
from inference_svc.backends.magnitudes import Divided, Magnitudes
from inference_svc.errors import AdapterUnusable, OutOfDeviceMemory
from inference_svc.model.description import Rank
from servicekit.errors import Internal
from tests.support.inference.ranks import exchanges, on_ranks

COUNT, HIDDEN, VOCAB, RANK = 4, 32, 37, 4
"""The last rank has 7 tokens, the others 10."""
TARGETS = (
    Target("embed_tokens", None, EMBEDDING, TargetKind.EMBEDDING, VOCAB, HIDDEN),
    Target("q_proj", 0, "q", TargetKind.LINEAR, HIDDEN, HIDDEN),
    Target("o_proj", 0, "o", TargetKind.LINEAR, HIDDEN, HIDDEN),
    Target("lm_head", None, HEAD, TargetKind.LINEAR, HIDDEN, VOCAB),
)
A, B, MAGNITUDE = SegmentKind.A, SegmentKind.B, SegmentKind.MAGNITUDE


def cut(target: Target, index: int) -> Target:
    part = (index * HIDDEN // COUNT, (index + 1) * HIDDEN // COUNT)
    cuts: dict[str, Any] = {"q_proj": {"out_slice": part}, "o_proj": {"in_slice": part}}
    return replace(target, **cuts.get(target.name, {}))


class Whole(NamedTuple):
    """The base's weights and an adapter's contents for each target, before they are cut."""

    weights: list[torch.Tensor]
    contents: list[dict[SegmentKind, torch.Tensor]]

    @classmethod
    def make(cls) -> Whole:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator) + 0.5

        weights = [random(VOCAB, HIDDEN), *(random(t.out_features, HIDDEN) for t in TARGETS[1:])]
        contents = []
        for target in TARGETS:
            is_embedding = target.kind is TargetKind.EMBEDDING
            a = random(VOCAB, RANK) if is_embedding else random(RANK, HIDDEN)
            b = random(RANK, target.out_features)
            contents.append({A: a, B: b, MAGNITUDE: random(target.out_features)})
        return cls(weights, contents)

    def ratios(self) -> list[torch.Tensor]:
        """Returns the magnitudes, divided, of whole targets."""
        found = []
        for target, weight, own in zip(TARGETS, self.weights, self.contents, strict=True):
            is_embedding = target.kind is TargetKind.EMBEDDING
            added = own[A] @ own[B] if is_embedding else (own[A].t() @ own[B]).t()
            norms = (weight + added).norm(dim=0 if is_embedding else 1)
            found.append(own[MAGNITUDE] / norms)
        return found


class Rows:
    """A projection of these rows; `fails` is called before rows are given."""

    def __init__(self, values: torch.Tensor, fails: Callable[[], None]) -> None:
        self.values, self.fails = values, fails

    def rows(self, start: int, end: int) -> torch.Tensor:
        self.fails()
        return self.values[start:end]


def nothing() -> None:
    """No fault."""


class Part:
    """One rank's part of the model and of adapters, in an arena."""

    def __init__(
        self, whole: Whole, index: int, exchange: Any, fails: Callable[[], None] = nothing
    ) -> None:
        rank = Rank(index, COUNT)
        self.targets = tuple(cut(target, index) for target in TARGETS)
        layout = ModelLayout("base", "0" * 64, torch.float32, IMAGE_FORMATS, self.targets)
        self.whole, self.arena = whole, Arena(layout, 1 << 17, 4, 64, torch.device("cpu"))
        self.slots = Slots(1 << 17, 4)
        start, end, _ = rank.part(VOCAB)
        embedding, q, o, head = whole.weights
        weights: Any = SimpleNamespace(
            embedding=embedding[start:end],
            projections={
                "q": Rows(q[slice(*self.targets[1].outputs)], nothing),
                "o": Rows(o[:, slice(*self.targets[2].inputs)], fails),
                HEAD: Rows(head[start:end], nothing),
            },
        )
        self.magnitudes = Magnitudes(weights, self.arena, rank, exchange)
        self.found: dict[str, list[torch.Tensor]] = {}

    def add(self, digest: str) -> None:
        segments, values, end = list[Segment](), list[torch.Tensor](), 0
        for index, (target, own) in enumerate(zip(self.targets, self.whole.contents, strict=True)):
            for kind, whole in own.items():
                value = whole
                if kind is A and target.kind is TargetKind.LINEAR:
                    value = whole[:, slice(*target.inputs)]
                elif kind is not A:
                    value = whole[..., slice(*target.outputs)]
                value, shape = value.contiguous(), tuple(value.shape)
                segments.append(
                    Segment(index, kind, RANK, end, value.nbytes, DataType.FLOAT32, shape)
                )
                values.append(value)
                end += -(-value.nbytes // 256) * 256
        header = ImageHeader(digest, digest, "layout", 2, end, tuple(segments))
        reservation = self.slots.reserve(header)
        assert reservation is not None
        [extent] = reservation.resident.extents
        self.found[digest] = []
        for segment, value in zip(segments, values, strict=True):
            first = (extent.start + segment.offset) // 4
            view = self.arena.flat[first : first + value.numel()].view(value.shape)
            view.copy_(value)
            if segment.kind is MAGNITUDE:
                self.found[digest].append(view)
        self.magnitudes.start(reservation.resident)

    def finish(self) -> list[tuple[int, Divided]]:
        """Returns what is done, and by which call."""
        calls = ((call, self.magnitudes.advance()) for call in range(200))
        return [(call, each) for call, done in calls for each in done]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Whole:
    """Eight rows at once, and between two steps: the last rank has fewer slices of tokens."""
    monkeypatch.setattr(magnitudes, "CPU_SLICE_ELEMENTS", 8 * HIDDEN)
    monkeypatch.setattr(magnitudes, "CPU_ELEMENTS", 8 * HIDDEN)
    return Whole.make()


def divide(
    whole: Whole, digests: Sequence[str], fails: Callable[[], None] = nothing
) -> list[tuple[Part, list[tuple[int, Divided]]]]:
    """Divides on all ranks, of which the last may fail."""
    all_exchanges = exchanges(COUNT)

    def run(index: int) -> tuple[Part, list[tuple[int, Divided]]]:
        part = Part(whole, index, all_exchanges[index], fails if index == COUNT - 1 else nothing)
        for digest in digests:
            part.add(digest)
        return part, part.finish()

    return list(on_ranks(COUNT, run))


def test_magnitudes_are_divided_by_the_norms_of_whole_rows(whole: Whole) -> None:
    """On each rank the outputs that it has, at the same time; adapters take turns."""
    done = divide(whole, ["one", "two"])
    first = done[0][1]
    assert [divided for _, divided in first] == [Divided("one"), Divided("two")]
    assert first[0][0] > 5, "a part at a time"
    for part, own in done:
        assert own == first
        for found in part.found.values():
            for target, value, ratio in zip(part.targets, found, whole.ratios(), strict=True):
                torch.testing.assert_close(value, ratio[slice(*target.outputs)])


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "lm_head", "embed_tokens"])
def test_an_output_that_becomes_zero_is_refused_by_all(whole: Whole, name: str) -> None:
    """An output of the last rank, too, which the first does not have."""
    place = [target.name for target in TARGETS].index(name)
    output = TARGETS[place].out_features - 1
    weight, own = whole.weights[place], whole.contents[place]
    (weight[:, output] if name == "embed_tokens" else weight[output]).zero_()
    own[B][:, output] = 0.0
    for _, done in divide(whole, ["one"]):
        [(_, (_, error))] = done
        assert isinstance(error, AdapterUnusable)
        assert f"a row of {name} becomes zero" in str(error)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfDeviceMemory),
        (ValueError("what nobody has thought of"), Internal),
    ],
)
def test_an_adapter_that_one_rank_cannot_divide_fails_on_all(
    whole: Whole, cause: Exception, kind: type[Exception]
) -> None:
    """In the middle of its work, alone, and at the same time."""
    faults = [cause]

    def fail() -> None:
        if faults:
            raise faults.pop()

    all_done = [done for _, done in divide(whole, ["one", "two"], fail)]
    assert len({tuple(call for call, _ in done) for done in all_done}) == 1
    for done in all_done:
        (_, (digest, error)), (_, other) = done
        assert (digest, type(error)) == ("one", kind)
        assert other == Divided("two")


class Watched:
    """An exchange that notes, before each sum, whether the rank has divided its last magnitudes."""

    def __init__(self, exchange: Any, whole: Whole) -> None:
        self.exchange, self.whole = exchange, whole
        self.part: Part | None = None
        self.has_divided: list[bool] = []

    def sum(self, x: torch.Tensor) -> None:
        assert self.part is not None
        found, expected = self.part.found["one"][-1], self.whole.ratios()[-1]
        self.has_divided.append(torch.allclose(found, expected))
        self.exchange.sum(x)


def test_ranks_meet_again_when_all_have_divided(whole: Whole) -> None:
    """Rank 0 frees the memory of an adapter that is refused: no rank may write to it then."""
    watched = [Watched(each, whole) for each in exchanges(COUNT)]

    def run(index: int) -> None:
        watched[index].part = part = Part(whole, index, watched[index])
        part.add("one")
        part.finish()

    on_ranks(COUNT, run)
    assert [each.has_divided for each in watched] == [[False, True]] * COUNT


def test_an_exchange_that_fails_is_no_fault_of_the_adapter(whole: Whole) -> None:
    class Broken:
        def sum(self, x: torch.Tensor) -> None:
            raise RuntimeError("another rank has ended")

    part = Part(whole, 0, Broken())
    part.add("one")
    with pytest.raises(RuntimeError, match="another rank has ended"):
        part.finish()
