"""The style sheets and scripts of dashboards, token inspector and book, as plain files without a build step."""

import html
import json
from functools import cache
from pathlib import Path
from typing import Any

WEB = Path(__file__).resolve().parent


@cache
def read_web(name: str) -> str:
    """Return the text of a file of this folder, such as "hover.js"."""
    return (WEB / name).read_text(encoding="utf-8")


def json_attribute(content: Any) -> str:
    """Return a value as JSON for an HTML attribute in single quotes, in which JSON's double quotes stay as they are.

    >>> json_attribute({"text": "it's <b>"})
    '{"text":"it&#39;s &lt;b&gt;"}'
    """
    stored = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return html.escape(stored, quote=False).replace("'", "&#39;")
