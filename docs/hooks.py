"""What the site's build adds to MkDocs: notebooks as pages, examples as such, nothing from afar.

Runs in `make docs`. Must not import shardrules: the site is built from sources alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

# What a browser would load by itself; links are not loaded.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|"""
    r"""<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//"""
)


def on_files(files: Files, config: Any) -> Files:
    """Return each notebook gets a page of its name, beside the notebook itself."""
    for file in [one for one in files if one.src_uri.endswith(".ipynb")]:
        page = MarkdownExporter().from_filename(file.abs_src_path)[0]
        name = Path(file.src_uri).name
        page += f"\n\n[This page as a notebook]({name})\n"
        uri = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, uri, content=page))
    return files


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
