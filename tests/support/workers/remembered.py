"""Remembers what libraries make anew for each client or file, and what is always the same.

These are the TLS settings of httpx's clients, for which it reads all certificates of the machine,
and the template of the card that peft writes beside each adapter.
"""

from __future__ import annotations

import functools
import os
import ssl

import httpx2
import jinja2
from httpx2._transports import default


@functools.cache
def _context(*_: str | None) -> ssl.SSLContext:
    return httpx2.create_ssl_context()


def _create_ssl_context(
    verify: object = True, cert: object = None, trust_env: bool = True
) -> object:
    if verify is True and cert is None and trust_env:
        return _context(*(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")))
    return httpx2.create_ssl_context(verify, cert, trust_env)


def install() -> None:
    """Holds for this process from now on."""
    default.create_ssl_context = _create_ssl_context
    jinja2.Template = functools.cache(jinja2.Template)  # type: ignore[misc, assignment]
