"""The style sheets and scripts of dashboards, token inspector and book, as plain files without a build step."""

from functools import cache
from pathlib import Path

WEB = Path(__file__).resolve().parent


@cache
def read_web(name: str) -> str:
    """Return the text of a file of this folder, such as "hover.js"."""
    return (WEB / name).read_text(encoding="utf-8")
