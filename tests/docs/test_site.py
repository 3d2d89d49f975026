"""The documentation as a site: MkDocs warns of nothing, and every link leads somewhere."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tools.pages import docs_site

pytestmark = pytest.mark.processes


class Links(HTMLParser):
    """Collects what a page links to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"href", "src"} and value:
                self.targets.add(unescape(value))
            if name == "id" and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert docs_site.build(folder) == 0
    return folder / "site"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (docs_site.ROOT / "mkdocs.yml").read_text()
    missing = [str(page) for page in docs_site.pages() if f": {page}\n" not in navigation]
    assert missing == []


def test_a_link_to_no_file_is_an_error() -> None:
    page = Path("docs/routing.md")
    known = {page, Path("docs/http.md")}
    linked = "[errors](http.md#errors), [settings](../mkdocs.yml)"
    assert docs_site.with_links(page, linked, known, "") == "[errors](http.md#errors), settings"
    with pytest.raises(ValueError, match=r"docs/routing\.md: link to \.\./http\.md"):
        docs_site.with_links(page, "[errors](../http.md#errors)", known, "")


def test_links_lead_to_pages_and_headings(site: Path) -> None:
    pages = {path.resolve(): read(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            other = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            other = other / "index.html" if other.is_dir() else other
            if not other.exists():
                broken.append(f"{path.relative_to(site.resolve())} -> {target}")
            elif parts.fragment and other in pages and parts.fragment not in pages[other].anchors:
                broken.append(f"{path.relative_to(site.resolve())} -> {target}: no such heading")
    assert broken == []


KNOWN_URLS = {
    "https://unpkg.com/mermaid@11/dist/mermaid.min.js": "pages with diagrams have the script",
    "https://unpkg.com/resize-observer-polyfill": "for browsers of before 2020",
    "https://api.github.com/repos/": "for sites that have a repo_url: ours has none",
    "https://api.github.com/users/": "the same",
    "https://clipboardjs.com/": "in a comment",
}
"""URLs in the theme's script, and why a page fetches nothing from them."""


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Fonts and scripts come with the site, and so does what the theme's script would fetch."""
    for path in site.rglob("*.html"):
        page = path.read_text()
        assert re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)', page) == [], path
        draws = 'class="mermaid"' in page
        script = path.parent / next(iter(re.findall(r'src="([^"]*mermaid[^"]*)"', page)), "none")
        assert script.exists() == draws, path
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", sheet.read_text()), sheet
    [bundle] = (site / "assets" / "javascripts").glob("bundle.*.js")
    assert set(re.findall(r"https?://[\w./@-]+", bundle.read_text())) <= KNOWN_URLS.keys()


def test_diagrams_without_mermaid() -> None:
    page = "```mermaid\nflowchart\n```\n"
    shown = docs_site.with_diagrams(Path("ARCHITECTURE.md"), page, are_drawn=False)
    assert shown == "```text\nflowchart\n```\n"


def read(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text())
    return links
