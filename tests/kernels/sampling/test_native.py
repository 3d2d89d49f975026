"""The native choice of tokens, and masks, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.native.library import Library
from kernels.sampling import NativeChoice, RowParams, reference
from kernels.sampling.reference import NOT_FINITE, OPEN, Draws, Limits

NEAR = 1e-5
"""By how much a row's number may change so that the definition takes the same token: weights are
rounded to fp32."""

TOP_P_NEAR = 1e-6
"""The same of top_p, whose cut falls between tokens that have shares as small."""

WIDTHS = [1, 7, 16, 255, 256, 257, 1000, 5000]
PARAMS = [
    RowParams(),
    RowParams(1.0),
    RowParams(0.3),
    RowParams(1e-38),
    RowParams(1e30),
    RowParams(0.7, top_k=1),
    RowParams(0.7, top_k=20),
    RowParams(0.7, top_k=20, top_p=0.95),
    RowParams(1.0, top_k=10_000),
    RowParams(1.0, top_p=0.1),
    RowParams(1.0, top_p=0.95),
    RowParams(2.0, top_p=0.999999),
    RowParams(1.0, min_p=0.05),
    RowParams(1.0, min_p=1.0),
    RowParams(1.5, top_k=50, top_p=0.8, min_p=0.01),
    RowParams(5.0, top_p=0.99, min_p=1e-9),
]


def definition(logits: torch.Tensor, params: RowParams, number: float) -> int:
    """The token of one row, [1, vocab], from all its tokens."""
    peaks = logits.amax(1, keepdim=True)
    if params.temperature == 0:
        return int(logits.argmax())
    limits = Limits(*(torch.tensor([[each]]) for each in params[1:]))
    draws = Draws(torch.tensor([0]), torch.tensor([[params.temperature]]), limits)
    numbers = torch.tensor([[number]], dtype=torch.float64)
    if params[1:] == (0, 1.0, 0.0):
        return int(reference.draw_uncut(logits, peaks, draws, numbers, 1))
    return int(reference.draw_sorted(logits, peaks, draws, numbers, torch.tensor([OPEN])))


def nearly(params: RowParams) -> list[RowParams]:
    """Returns the parameters, and top_p within rounding of them."""
    if params.top_p == 1:
        return [params]
    shares = (params.top_p - TOP_P_NEAR, params.top_p, min(1.0, params.top_p + TOP_P_NEAR))
    return [params._replace(top_p=each) for each in shares]


@pytest.mark.matrix
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_tokens_are_the_definitions(library: Library, width: int, scale: float) -> None:
    generator = np.random.default_rng(width)
    rows = PARAMS * 4
    logits = torch.from_numpy(generator.normal(size=(len(rows), width + 3)) * scale).float()
    logits[:, 3:width:5] = -math.inf
    choice = NativeChoice(library, rows, width)
    choice.numbers[:] = generator.random(len(rows))
    choice.numbers[:2], choice.numbers[-1] = 0.0, 1 - 2**-53
    tokens, _ = choice.choose(logits[:, :width])
    for row, (params, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        number, own = choice.numbers[row], logits[row : row + 1, :width]
        assert not own[0, token].isneginf()
        if token == definition(own, params, number):
            continue
        near = [max(0.0, number - NEAR), number, min(1 - 2**-53, number + NEAR)]
        wanted = {definition(own, each, n) for each in nearly(params) for n in near}
        if params == RowParams(params.temperature):
            # Uncut tokens come in their order: all in between have hardly any weight.
            assert min(wanted) <= token <= max(wanted), (params, number, token, wanted)
        else:
            assert token in wanted, (params, number, token, wanted)


def test_a_row_does_not_depend_on_others(library: Library) -> None:
    logits = torch.randn(len(PARAMS), 3000, generator=torch.Generator().manual_seed(1))
    numbers = np.random.default_rng(1).random(len(PARAMS))
    together = NativeChoice(library, PARAMS, 3000)
    together.numbers[:] = numbers
    found = together.choose(logits)[0].tolist()
    for row, params in enumerate(PARAMS):
        alone = NativeChoice(library, [params], 3000)
        alone.numbers[:] = numbers[row]
        assert alone.choose(logits[row : row + 1])[0].tolist() == [found[row]]


@pytest.mark.parametrize("params", [RowParams(), RowParams(1.0), RowParams(1.0, top_p=0.9)])
@pytest.mark.parametrize("place", [0, 17, 299])
def test_rows_that_are_not_finite_are_named(
    library: Library, params: RowParams, place: int
) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(place))
    for row, value in enumerate((math.nan, math.inf, -math.nan)):
        logits[row, place] = value
    logits[3] = -math.inf
    tokens, _ = NativeChoice(library, [params] * 5, 300).choose(logits)
    assert [token == NOT_FINITE for token in tokens] == [True] * 4 + [False]


def test_the_first_of_equal_logits_is_the_largest(library: Library) -> None:
    logits = torch.zeros(1, 100)
    logits[0, [41, 57, 99]] = 2.0
    assert NativeChoice(library, [RowParams()], 100).choose(logits)[0].tolist() == [41]


@pytest.mark.parametrize("temperature", [1.0, 100.0])
def test_the_larger_of_logits_with_the_same_weight_is_before(
    library: Library, temperature: float
) -> None:
    logits = torch.full((1, 100), -5.0)
    logits[0, 41] = 0.5
    logits[0, 57] = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))
    params = [RowParams(temperature, top_k=1)]
    assert NativeChoice(library, params, 100).choose(logits)[0].tolist() == [57]


def test_sorted_tokens_are_counted(library: Library) -> None:
    """They are paid for by the tenant whose row it is."""
    logits = torch.zeros(3, 4000)
    logits[1, 5] = 50.0
    rows = [RowParams(1.0, top_p=0.9), RowParams(1.0, top_p=0.9), RowParams(1.0)]
    _, num_sorted = NativeChoice(library, rows, 4000).choose(logits)
    assert num_sorted.tolist() == [4000, 1, 0]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.001, 0.5, 0.99])
def test_masked_tokens_are_the_ones_of_logits_without_the_others(
    library: Library, width: int, share: float
) -> None:
    """Rows with masks choose as if the logits of other tokens were -inf; logits stay."""
    generator = np.random.default_rng(width)
    num_rows = 2 * len(PARAMS)
    logits = torch.from_numpy(3 * generator.normal(size=(num_rows, width + 9))).float()
    before = logits.clone()
    rows = [row for row in range(num_rows) if row % 3]
    is_allowed = generator.random((len(rows), width)) < share
    is_allowed[:, generator.integers(width)] = True
    is_allowed[0] = False
    masks = np.packbits(is_allowed, axis=1, bitorder="little")
    masks[:, -1] |= 0xFF << (1 + (width - 1) % 8) & 0xFF  # no tokens
    cut = logits.clone()[:, :width]
    reference.keep_allowed(cut, torch.tensor(rows), torch.from_numpy(masks))
    choice = NativeChoice(library, PARAMS * 2, width)
    choice.numbers[:] = generator.random(num_rows)
    wanted = choice.choose(cut)[0].tolist()
    found = choice.choose(logits[:, :width], rows, masks)[0].tolist()
    assert found == wanted
    assert found[rows[0]] == NOT_FINITE, "it may choose no token"
    assert torch.equal(logits, before)
    assert choice.choose(logits[:, :width])[0][rows[0]] != NOT_FINITE, "masks are of one call"


@pytest.mark.parametrize("params", [RowParams(), RowParams(1.0), RowParams(1.0, top_p=0.9)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_mask_hides_no_logit_that_is_not_finite(
    library: Library, params: RowParams, value: float
) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    logits[:, 7] = value
    logits[1, 7] = -math.inf
    masks = np.zeros((2, 38), np.uint8)
    masks[:, 30] = 1
    tokens, _ = NativeChoice(library, [params] * 2, 300).choose(logits, [0, 1], masks)
    assert tokens.tolist() == [NOT_FINITE, 240]
