from hypothesis import given
from hypothesis import strategies as st

from inference_svc.text.stop import StopMatcher

LETTERS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def oracle(text: str, stops: list[str], protected: int) -> tuple[str, bool]:
    """Tests every prefix: returns the first that ends with a stop string."""
    for end in range(protected + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


def run(pieces: list[str], stops: list[str], num_protected: int) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for index, piece in enumerate(pieces):
        text, stopped = matcher.push(piece, may_stop=index >= num_protected)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, num_protected=st.integers(0, 4))
def test_pieces_match_like_the_joined_text(
    pieces: list[str], stops: list[str], num_protected: int
) -> None:
    protected = len("".join(pieces[:num_protected]))
    want, want_stopped = oracle("".join(pieces), stops, protected)
    got, stopped = run(pieces, stops, num_protected)
    assert stopped == want_stopped
    assert got == want


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_text_of_a_later_match_is_held_back(pieces: list[str], stops: list[str]) -> None:
    """And no other text is."""
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        new, stopped = matcher.push(piece)
        shown += new
        if stopped:
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
        longest = max((s for s in starts if text.endswith(s)), key=len, default="")
        assert held == longest


def test_matches_across_token_borders() -> None:
    assert run(["Hello\n", "\nUs", "er:"], ["\n\nUser:"], 0) == ("Hello", True)
    assert run(["Hello\n", "\nUs", "a"], ["\n\nUser:"], 0) == ("Hello\n\nUsa", False)
    assert run(["語", "り", "終わ", "り。"], ["終わり"], 0) == ("語り", True)


def test_text_below_min_tokens_is_not_cut() -> None:
    assert run(["stop", "x", "stop"], ["stop"], 1) == ("stopx", True)
    assert run(["st", "op"], ["stop"], 1) == ("", True)
