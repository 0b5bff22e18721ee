"""`inverse`: renames that turn a tree back into the arrays of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from shardrules._base.arguments import as_tuple, check_items
from shardrules._base.text import shown
from shardrules._checkpoint.boxes import Groups
from shardrules._checkpoint.patterns import Token, tokens_of
from shardrules._checkpoint.renames import Rename, numbered_axes, stacked_axes

# What `re.sub` puts in: a group by name or number, a character, or an axis.
_TEMPLATE: Final = re.compile(r"\\g<(\w+)>|\\([1-9]\d?)|\\(.)|\{(\w+)\}|([^\\{]+|\{)", re.DOTALL)


def inverse(renames: Iterable[Rename]) -> tuple[Rename, ...]:
    r"""Return the renames that undo these, as for `save` with the names of Hugging Face.

    Scales are not made again, and dtypes stay what they are. Arrays that were left out stay out.
    What a `shared` record made is left out.

    Args:
        renames: The records. Their patterns may have texts, groups, `^` and `$`; their paths must
            have all groups, but for those along which `dims` stacks.

    Returns:
        The records, in their order, all of them optional.

    Raises:
        ValueError: A record loses something: a group, a part without a word, repeats, or `resize`.

    Example:
        >>> import shardrules as sr
        >>> record = sr.Rename(r"^h\.(\d+)\.w$", r"layers/\1/kernel", "out in -> in out")
        >>> (back,) = sr.renames.inverse([record])
        >>> back.pattern, back.path, back.dims
        ('^layers/(?P<g1>\\d+)/kernel$', 'h.\\g<g1>.w', 'in out -> out in')
    """
    records = check_items("renames", as_tuple("renames", renames, "Renames"), Rename, "a Rename")
    results: list[Rename] = []
    reasons: dict[str, tuple[Rename, str]] = {}
    made = set()
    for record in records:
        if record.path is None:
            continue
        if reason := _loss(record):
            reasons.setdefault(record.path, (record, reason))
            continue
        results += _inverses(record)
        made.add(record.path)
    for path, (record, reason) in reasons.items():
        if path not in made:
            raise ValueError(f"{shown(record)} has no inverse: {reason}; write a record for it")
    return tuple(results)


def _loss(record: Rename) -> str:
    """Say why a record has no inverse; "" if it has one."""
    dims = record.arrangement
    repeated = () if dims is None else {*dims.stacked}.difference(stacked_axes(record))
    checks = {
        "resize does not tell the old size": record.resize,
        f"it repeats along {', '.join(repeated)}": repeated,
        "it takes a part of each row": _is_inner(record),
        "it leaves a part out": any(None in row for row in record.words.values()),
    }
    return next((reason for reason, holds in checks.items() if holds), _loss_of_names(record))


def _loss_of_names(record: Rename) -> str:
    tokens = tokens_of(record.pattern)
    if tokens is None or (record.path != r"\g<0>" and any(t.kind == "other" for t in tokens)):
        return "its pattern has more than texts and groups"
    if record.path == r"\g<0>":
        return ""
    groups = {_group_key(i, t): t for i, t in enumerate(_group_tokens(tokens), 1)}
    if any(re.compile(token.text).groups for token in groups.values()):
        return "a group of its pattern has groups"
    kept = {*_references(record.path or "", groups), *stacked_axes(record), *numbered_axes(record)}
    lost = [key for key in groups if key not in kept]
    return f"its path does not have the group {lost[0]}" if lost else ""


def _group_tokens(tokens: Sequence[Token]) -> list[Token]:
    return [token for token in tokens if token.kind == "group"]


def _group_key(number: int, token: Token) -> str:
    return token.name or f"g{number}"


def _references(path: str, groups: Mapping[str, Token]) -> list[str]:
    keys = [*groups]
    words = [match[1] or match[2] for match in _TEMPLATE.finditer(path)]
    return [keys[int(word) - 1] if word.isdecimal() else word for word in filter(None, words)]


def _inverses(record: Rename) -> Iterator[Rename]:
    dims = record.arrangement
    tokens = tokens_of(record.pattern) or []
    words = {**record.words, **_inverse_words(record)}
    if record.path == r"\g<0>":
        pattern, path = record.pattern, record.path
    else:
        groups = {_group_key(i, token): token for i, token in enumerate(_group_tokens(tokens), 1)}
        pattern = "".join(_pattern_parts(record, groups, tokens))
        path = "".join(_path_parts(record, tokens))
    if record.shared:
        yield Rename(pattern, None, optional=True)
        return
    text = (
        None
        if dims is None
        else f"{_arrangement_text(dims.target)} -> {_arrangement_text(dims.source)}"
    )
    yield Rename(pattern, path, text, record.sizes, words, optional=True)


def _is_inner(record: Rename) -> bool:
    """Say whether an axis takes rows of a dimension apart."""
    dims = record.arrangement
    return dims is not None and any(
        axis in dims.unstacked for group in dims.source for axis in group[1:]
    )


def _inverse_words(record: Rename) -> dict[str, tuple[Any, ...]]:
    """Return the words for groups that the path numbers: by the word, the number."""
    words = {}
    for axis in {*numbered_axes(record)}.intersection(record.words):
        numbers = {int(str(word)): i for i, word in enumerate(record.words[axis])}
        words[axis] = tuple(numbers.get(i) for i in range(max(numbers) + 1))
    return words


def _axis_group(record: Rename, axis: str) -> str:
    words = record.words.get(axis)
    if words is None or axis in numbered_axes(record):
        return rf"(?P<{axis}>\d+)"
    return f"(?P<{axis}>{'|'.join(re.escape(str(word)) for word in words)})"


def _pattern_parts(
    record: Rename, groups: Mapping[str, Token], tokens: Sequence[Token]
) -> Iterator[str]:
    keys = [*groups]
    if tokens and tokens[0] == Token("anchor", "^"):
        yield "^"
    for name, number, escaped, axis, text in _TEMPLATE.findall(record.path or ""):
        if axis:
            yield _axis_group(record, axis)
        elif name or number:
            word = name or number
            key = keys[int(word) - 1] if word.isdecimal() else word
            yield f"(?P<{key}>{groups[key].text})"
        else:
            yield re.escape(escaped or text)
    if tokens and tokens[-1] == Token("anchor", "$"):
        yield "$"


def _path_parts(record: Rename, tokens: Sequence[Token]) -> Iterator[str]:
    by_number = {*stacked_axes(record), *numbered_axes(record)}
    number = 0
    for token in tokens:
        if token.kind == "text":
            yield token.text.replace("\\", r"\\")
        elif token.kind == "group":
            number += 1
            key = _group_key(number, token)
            yield f"{{{key}}}" if key in by_number else rf"\g<{key}>"


def _arrangement_text(groups: Groups) -> str:
    return " ".join("1" if not g else g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups)
