"""`Rename`: names of arrays as templates, one for a checkpoint and one for the tree; both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from shardrules._base.arguments import as_tuple, boolean, check_items, check_type, integer
from shardrules._base.dtypes import as_dtype_name
from shardrules._base.text import SLIP, nearest, without_defaults
from shardrules._checkpoint.layouts import Arrangement, arrangement

_A_RENAME: Final = "a Rename, such as shardrules.Rename('layers.{layer}.w', 'layers/{layer}/w')"
_TOKEN: Final = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]|[^{}]+")
_FIELD: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:(?P<many>\*)|:(?P<words>.*))?", re.DOTALL)
# A number of more digits is none of a layer or an expert.
_MOST_DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Rename:
    """Templates for the names of arrays: in a checkpoint, and in the tree that gets them.

    A field in braces stands for what differs: `{layer}` for a part of a name, or a piece of one,
    without `.` and `/`; `{part:gate|up}` for one of these words; `{rest*}` for one or more whole
    parts, which get the separators of the template in which they are written, if it has any.
    A part has one field at most, so a name can be read in one way. `{{` is a brace.

    The first record whose template is the whole of a name counts. A name that none finds stays.
    One list serves `load` and `reshard`, and, backwards, `save`.

    Args:
        name: The template of names in the checkpoint: `"layers.{layer}.mlp.{part}_proj.weight"`.
        path: That of paths in the tree, with the same fields: `"layers/{layer}/{part}/kernel"`. If
            both sides have words for a field, the first becomes the first, and so on. None leaves
            the arrays out.
        dims: How the dimensions of the checkpoint's array make those of the tree's, as einops
            writes it: `"out in -> in out"` transposes; `"(heads dim) in -> in heads dim"` reshapes.
            An axis on the right alone stacks arrays by the field of this name, which the path does
            not have: `"out in -> layer in out"`, or joins them: `"out in -> in (part out)"`. Stacks
            are in the order of the field's words, or of numbers from 0 on. Without a field, it
            repeats the array as often as `sizes` says: `"(kv dim) in -> in (kv times) dim"`. An
            axis on the left alone takes an array apart, by the field that only the path has:
            `"(part out) in -> in out"`. Such an axis is the first of its dimension. `1` is a
            dimension of one element. Default: as they are.
        sizes: Sizes of axes that one dimension consists of. Those that the other axes give may be
            left out. `sizes={"out": (4096, 1024, 1024)}` has one size per part, where parts are of
            several sizes.
        dtype: The dtype that the arrays get, whatever `dtype` of the call is. Default: theirs.
        optional: Whether it may be that no array has such a name, as in lists for several models.
            Default: that is an error.
        shared: Whether the array also stays what it is without this record, as an embedding that is
            the head, too. A path that another array makes is not made. Default: False.
        resize: Per axis that is a dimension of the result, its size there: elements at the end are
            left out, or zeros added.

    Raises:
        ValueError: The record contradicts itself.

    Example:
        >>> import shardrules as sr
        >>> sr.Rename(
        ...     "model.layers.{layer}.self_attn.q_proj.weight",
        ...     "layers/attn/query/kernel",
        ...     "(heads head_dim) embed -> layer embed heads head_dim",
        ...     sizes={"head_dim": 128},
        ... ).path
        'layers/attn/query/kernel'
    """

    name: str
    path: str | None
    dims: str | None = None
    sizes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict, hash=False)
    dtype: Any = None
    optional: bool = field(default=False, kw_only=True)
    shared: bool = field(default=False, kw_only=True)
    resize: Mapping[str, int] = field(default_factory=dict, hash=False, kw_only=True)

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "a template such as 'layers.{layer}.weight'")
        check_type("path", self.path, str | None, "a template, or None to leave the arrays out")
        check_type("dims", self.dims, str | None, "a string such as 'out in -> in out', or None")
        boolean("optional", self.optional)
        if boolean("shared", self.shared) and self.path is None:
            raise ValueError("shared is for records that make an array: give a path, too")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", as_dtype_name("dtype", self.dtype))
        check_type("sizes", self.sizes, Mapping, "a dict such as {'head_dim': 128}")
        check_type("resize", self.resize, Mapping, "a dict such as {'vocab': 128256}")
        for keyword, values in (("sizes", self.sizes), ("resize", self.resize)):
            checked = {axis: _checked_size(keyword, axis, size) for axis, size in values.items()}
            object.__setattr__(self, keyword, checked)
        name, dims = Template("name", self.name), arrangement(self.dims)
        if self.path is None:
            if self.dims or self.sizes or self.dtype or self.resize:
                raise ValueError("dims, sizes, dtype and resize are for records with a path")
            return
        _check_axes(self, name, Template("path", self.path), dims)


class MisfitError(Exception):
    """Array that does not fit its record."""


class Field(NamedTuple):
    """What stands in braces."""

    name: str
    words: tuple[str, ...]
    """The words that may stand there; none for any text."""
    is_many: bool
    """Whether it is whole parts."""


class Template:
    """A name with fields."""

    def __init__(self, keyword: str, text: str) -> None:
        self.fields: dict[str, Field] = {}
        self._pieces: list[str | Field] = []
        for token in _TOKEN.findall(text):
            if token in ("{", "}"):
                raise ValueError(f"{keyword} {text!r}: {token!r} is alone; write {token * 2}")
            if token in ("{{", "}}") or not token.startswith("{"):
                self._pieces.append(token[0] if token in ("{{", "}}") else token)
                continue
            added = _field(keyword, text, token)
            if added.name in self.fields:
                raise ValueError(f"{keyword} {text!r} has {{{added.name}}} twice")
            self.fields[added.name] = added
            self._pieces.append(added)
        if sum(each.is_many for each in self.fields.values()) > 1:
            raise ValueError(f"{keyword} {text!r} has two fields with a *; one may have it")
        marked = "".join(
            piece.replace("{", "") if isinstance(piece, str) else "{" for piece in self._pieces
        )
        self.separator = next((each for each in "/." if each in marked), "")
        if any(part.count("{") > 1 for part in re.split("[./]", marked)):
            raise ValueError(
                f"{keyword} {text!r} has two fields in a part; write a Rename for each word of one"
            )

    def regex(self, words: Mapping[str, Sequence[str]]) -> re.Pattern[str]:
        """Return the regex of names, where fields have these words."""
        texts = []
        for piece in self._pieces:
            if isinstance(piece, str):
                texts.append(re.escape(piece))
                continue
            any_text = "[^./](?:.*[^./])?" if piece.is_many else "[^./]+"
            inner = "|".join(map(re.escape, words[piece.name])) or any_text
            texts.append(f"(?P<{piece.name}>{inner})")
        return re.compile("".join(texts), re.DOTALL)

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the name with these texts in the fields."""
        return "".join(
            piece if isinstance(piece, str) else values[piece.name] for piece in self._pieces
        )


def _field(keyword: str, text: str, token: str) -> Field:
    match = _FIELD.fullmatch(token[1:-1])
    if match is None:
        raise ValueError(
            f"{keyword} {text!r}: {token} is no field; write a name in braces, such as {{layer}}, "
            "{part:gate|up} or {rest*}"
        )
    words = () if match["words"] is None else tuple(match["words"].split("|"))
    if len({*words}) < len(words) or "" in words or set("./").intersection("".join(words)):
        raise ValueError(
            f"{keyword} {text!r}: {token} has a word twice, an empty one, or one with a separator"
        )
    return Field(match["name"], words, match["many"] is not None)


def _check_axes(record: Rename, name: Template, path: Template, dims: Arrangement) -> None:
    """Check that each field and axis is on both sides; or a field and an axis; or has a size."""
    if record.dims is None and (record.sizes or record.resize):
        raise ValueError("sizes and resize are for the axes of dims: give dims, too")
    text = f"dims {record.dims!r}"
    repeated = {axis for axis in dims.stacked if isinstance(record.sizes.get(axis), int)}
    for keyword, side, opposite, axes, others, example, fix in (
        ("name", name, path, dims.stacked, dims.unstacked, "stack along it: dims='a -> {} a'",
         "to repeat along it, give its size in sizes"),
        ("path", path, name, dims.unstacked, dims.stacked, "take apart along it: dims='{} a -> a'",
         "or write it on the right of ->, too"),
    ):  # fmt: skip
        for piece in side.fields.values():
            mirror = opposite.fields.get(piece.name)
            if mirror is None and piece.name not in axes:
                raise ValueError(
                    f"{{{piece.name}}} is in {keyword} {getattr(record, keyword)!r} alone; write "
                    f"it on the other side, too, or {example.format(piece.name)}"
                )
            if mirror is not None and (
                piece.name in axes
                or piece.is_many != mirror.is_many
                or (piece.words and mirror.words and len(piece.words) != len(mirror.words))
            ):
                raise ValueError(
                    f"{{{piece.name}}} is not alike in name and path: give as many words, or a * "
                    "on both sides; and dims cannot stack or take apart along it"
                )
        if unmatched := {*axes} - side.fields.keys() - repeated:
            axis = min(unmatched)
            near = nearest(axis, (*others, *side.fields), SLIP)
            meant = f"; did you mean {near!r}?" if near else ""
            raise ValueError(
                f"{text} has {axis!r} on one side alone, for which the {keyword} needs a "
                f"field {{{axis}}}{meant}; {fix}"
            )
    alone = {*dims.stacked, *dims.unstacked} - (repeated - name.fields.keys())
    for group in (*dims.source, *dims.target):
        if inner := alone.intersection(group[1:]):
            raise ValueError(
                f"{text} stacks or takes apart along {min(inner)!r}, so it must be the first of "
                "its dimension; what else there is, do in a jit of your own"
            )
    if unknown := record.sizes.keys() - {axis for side in dims for group in side for axis in group}:
        raise ValueError(f"sizes has {min(unknown)!r}, which is no axis of {record.dims!r}")
    for axis, size in record.resize.items():
        if (axis,) not in dims.target or axis in dims.stacked or not isinstance(size, int):
            raise ValueError(
                f"resize has {axis!r}: {size!r}, which is no dimension of the result of "
                f"{record.dims!r} with its size"
            )


def _checked_size(keyword: str, axis: str, size: Any) -> int | tuple[int, ...]:
    if not isinstance(size, tuple | list):
        return integer(f"{keyword}[{axis!r}]", size, 1)
    return tuple(integer(f"{keyword}[{axis!r}][{i}]", each, 1) for i, each in enumerate(size))


class DirectedRename:
    """A `Rename` in one direction, backwards from the tree to the checkpoint."""

    def __init__(self, rename: Rename, *, is_back: bool) -> None:
        self.rename, self.is_back = rename, is_back
        # Kept by `targets`: by shape, into which regions arrays are taken apart.
        self.regions: dict[Any, Any] = {}
        name = Template("name", rename.name)
        path = name if rename.path is None else Template("path", rename.path)
        self._source, self._goal = source, goal = (path, name) if is_back else (name, path)
        self.text = (rename.path or "") if is_back else rename.name
        self._words = {
            key: field.words or (goal.fields[key].words if key in goal.fields else ())
            for key, field in source.fields.items()
        }
        self._search = source.regex(self._words).fullmatch
        dims = arrangement(rename.dims)
        self.dims = Arrangement(*dims[::-1]) if is_back else dims
        # The axes along which arrays are stacked, and along which one is taken apart.
        self.stacked = tuple(key for key in source.fields if key not in goal.fields)
        self.apart = tuple(key for key in goal.fields if key not in source.fields)

    def values(self, name: str) -> dict[str, str] | None:
        """Return the texts of the fields; None for a name that it does not find."""
        match = self._search(name)
        return None if match is None else match.groupdict()

    def words(self, axis: str) -> tuple[str, ...]:
        """Return the words of an axis along which it stacks, or takes apart."""
        fields = self._source.fields if axis in self._source.fields else self._goal.fields
        return fields[axis].words

    def positions(self, values: Mapping[str, str]) -> dict[str, int]:
        """Return, by axis that stacks, the index of the array with these texts."""
        return {axis: self._position(axis, values[axis]) for axis in self.stacked}

    def _position(self, axis: str, word: str) -> int:
        if words := self.words(axis):
            return words.index(word)
        # Backwards, 07 would be 7.
        if word.isascii() and re.fullmatch(r"0|[1-9]\d*", word) and len(word) <= _MOST_DIGITS:
            return int(word)
        raise MisfitError(
            f"{word!r} is no number along {axis!r}; give the words in their order, as in "
            f"{{{axis}:a|b}}"
        )

    def path(self, values: Mapping[str, str], part: Mapping[str, int]) -> str:
        """Return the name of the result; of a part, by its index along axes that take apart."""
        texts = {}
        for key, piece in self._goal.fields.items():
            if key in part:
                texts[key] = piece.words[part[key]] if piece.words else str(part[key])
                continue
            text = values[key]
            if piece.words:
                text = piece.words[self._words[key].index(text)]
            if piece.is_many and self._goal.separator:
                text = re.sub("[./]", self._goal.separator, text)
            texts[key] = text
        return self._goal.filled(texts)


def checked_renames(renames: Any) -> tuple[Rename, ...]:
    """Return the Renames that a user gives."""
    return check_items("renames", as_tuple("renames", renames, "Renames"), Rename, _A_RENAME)


def forwards(renames: Sequence[Rename]) -> list[DirectedRename]:
    """Return what renames do with the arrays of a checkpoint."""
    return [DirectedRename(rename, is_back=False) for rename in renames]


def backwards(renames: Sequence[Rename]) -> list[DirectedRename]:
    """Return what turns arrays of the tree back; an error if something was lost on the way."""
    for rename in renames:
        if reason := _loss(rename):
            raise ValueError(f"renames: {rename!r} cannot go back: {reason}")
    return [DirectedRename(rename, is_back=True) for rename in renames if rename.path is not None]


def _loss(rename: Rename) -> str:
    """Say why a record cannot go back; "" if it can."""
    if rename.path is None:
        return "" if rename.optional else "it leaves arrays out; give optional=True to do without"
    dims = arrangement(rename.dims)
    name, path = Template("name", rename.name), Template("path", rename.path)
    repeated = [axis for axis in dims.stacked if axis not in name.fields]
    joined = [
        axis
        for group in dims.target
        for axis in group[1:]
        if group[0] in name.fields and group[0] in dims.stacked and axis not in rename.sizes
    ]
    is_unclear = path.separator and not name.separator
    checks = {
        "resize does not tell the old size": rename.resize,
        f"it repeats along {', '.join(repeated)}": repeated,
        f"dtype {rename.dtype} may have rounded; leave dtype out": rename.dtype
        not in (None, "float32", "float64"),
        f"its parts may be of several sizes; give sizes of {', '.join(joined)}": joined,
        f"the name does not tell what {path.separator!r} stands for; write it there, as in "
        "'{first}.{rest*}'": is_unclear and any(each.is_many for each in path.fields.values()),
    }
    return next((reason for reason, holds in checks.items() if holds), "")
