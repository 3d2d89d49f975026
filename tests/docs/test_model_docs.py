"""docs/models.md has what the service knows of models."""

from tools.pages.model_docs import PATH, render


def test_the_page_is_up_to_date() -> None:
    assert PATH.read_text() == render(), "run `make docs`"
