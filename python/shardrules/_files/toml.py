"""TOML from bytes, with every way to fail made a `FileError`.

`tomllib` takes time quadratic in the parts of a key (50 s for 80 kB of `a.a.a`), so they are
counted before it parses. Costs what `tomllib` costs. Must not know what the TOML means.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from shardrules._file_content import text_of
from shardrules._file_error import FileError

__all__ = ["parse_toml", "without_strings"]

# Five more than a rule needs.
_MOST_LEVELS: Final = 8
# Strings and comments, where dots mean nothing. An unclosed one extends to the end of the text, so
# the search never starts again.
_NO_KEY: Final = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?(?:\"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|\#[^\n]*""",
    re.DOTALL,
)
_KEY: Final = re.compile(r"[\w\-. \t]+")
_CHARACTER: Final = re.compile(r"[^\n]")


def parse_toml(path: Path, data: bytes) -> dict[str, Any]:
    """Parses bytes of a file as TOML.

    Raises:
        FileError: They are not TOML, or a key has too many levels.
    """
    import tomllib  # few processes read any

    text = text_of(path, data)
    if any(key.count(".") >= _MOST_LEVELS for key in _KEY.findall(_NO_KEY.sub("", text))):
        raise FileError(f"{path}: a key has more than {_MOST_LEVELS} levels; rules need 3 levels")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        raise FileError(f"{path}: this is not TOML: {error}; correct it there") from None
    except RecursionError:
        raise FileError(f"{path}: the TOML is nested too deeply; rules need 3 levels") from None


def without_strings(text: str) -> str:
    """The TOML with strings made underscores and comments spaces, of the same length and lines."""

    def blank(found: re.Match[str]) -> str:
        return _CHARACTER.sub(" " if found[0].startswith("#") else "_", found[0])

    return _NO_KEY.sub(blank, text)
