"""The blocking client is what the asyncio one generates."""

from __future__ import annotations

import pytest

from tools.unasync import FILES, NAMES, ROOT, SENTENCES, blocking, render


@pytest.mark.processes
@pytest.mark.parametrize("path", FILES)
def test_generated_files_are_current(path: str) -> None:
    assert (ROOT / FILES[path]).read_text() == render(path), "run `make client`"


def test_every_replacement_is_used() -> None:
    text = "".join((ROOT / path).read_text() for path in FILES)
    assert [each for each in (*NAMES, *SENTENCES) if each not in text] == []


def test_tokens_and_docstrings() -> None:
    source = '''async def use(client: AsyncClient) -> None:
    """`async with AsyncClient() as client`: the asynchronous awaits."""
    async for chunk in tasks.run(await client.get("await x")):  # async stays
        yield await chunk
'''
    assert (
        blocking(source)
        == '''def use(client: Client) -> None:
    """`with Client() as client`: the asynchronous awaits."""
    for chunk in threads.run(client.get("x")):  # async stays
        yield chunk
'''
    )
