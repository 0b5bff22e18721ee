"""What the site's build adds to MkDocs: references, examples, nothing from afar.

Runs in `make docs`. Must not import shardrules: the site is built from sources alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

# What a browser would load by itself; links are not loaded.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|"""
    r"""<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//"""
)


_API = re.compile(r"^<!-- api (\S+): (.*?) -->$", re.MULTILINE | re.DOTALL)
_OF_README = re.compile(r"^<!-- of README: (## .*) -->$", re.MULTILINE)
_README = Path(__file__).parent.parent / "README.md"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with each section of the README and each reference that it asks for."""
    readme = _README.read_text(encoding="utf-8").replace("](docs/", "](")
    markdown = _OF_README.sub(
        lambda of: of[1] + readme.partition(of[1])[2].partition("\n## ")[0], markdown
    )
    return _API.sub(
        lambda api: "\n\n".join(f"::: {api[1]}.{name}" for name in api[2].split()), markdown
    )


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page that loads anything from another host is an error."""
    found = _LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output


class ExampleSections(griffe.Extension):
    """Our docstrings say `Example:`, as Google's style guide does; griffe knows `Examples:`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )
