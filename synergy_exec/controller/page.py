"""The page that shows jobs in a browser: one file, which asks `/state` with the token that its reader gives."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web

_FILE = Path(__file__).with_name("page.html")


def page() -> web.Response:
    """The page. A browser runs nothing on it but its own script, and talks to nobody but this controller."""
    text = _FILE.read_text(encoding="utf-8")
    rules = (
        "default-src 'none'",
        f"script-src '{_hash(text, 'script')}'",
        f"style-src '{_hash(text, 'style')}'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)


def _hash(text: str, element: str) -> str:
    """Of an element's content, as a Content-Security-Policy names it."""
    found = re.search(rf"<{element}>(.*)</{element}>", text, re.DOTALL)
    assert found is not None
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
