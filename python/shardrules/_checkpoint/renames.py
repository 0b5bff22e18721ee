"""`Rename`: arrays of a checkpoint under other names and in other layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shardrules._base.arguments import as_tuple, boolean, check_type, integer
from shardrules._base.dtypes import given_name
from shardrules._base.text import SLIP, nearest, shown, without_defaults
from shardrules._checkpoint.boxes import Arrangement, arrangement
from shardrules._rules.patterns import check_template

A_RENAME: Final = r"a Rename, such as shardrules.Rename(r'^transformer/', '')"


@dataclass(frozen=True, slots=True)
class Rename:
    r"""Arrays of a checkpoint that have another name in the tree, or lie otherwise.

    The first record whose pattern finds a name counts; if it is `shared`, the next one that does so
    counts, too. A name that none finds stays.

    Args:
        pattern: A regex that `re.search` finds in the array's name.
        path: What `re.sub` puts in the place of what was found; the result is the path in the tree.
            `{axis}` stands for the number or word along an axis that the path takes apart; or, if
            the pattern has such a group, for the place of what it finds among `words`, or the
            number. None leaves the array out.
        dims: How the dimensions of the checkpoint's array make those of the tree's, as einops
            writes it: `"out in -> in out"` transposes; `"(heads dim) in -> in heads dim"` reshapes.
            An axis on the right alone stacks arrays, by the number or word that the pattern's group
            of this name finds: `"out in -> layer in out"`, or joined, `"out in -> in (part out)"`.
            Without such a group, it repeats the array as often as `sizes` says:
            `"(kv dim) in -> in (kv times) dim"`. An axis on the left alone takes an array apart,
            into the paths that `{axis}` in `path` makes: `"(part out) in -> in out"`, or, part by
            part of each head, `"(heads part dim) in -> in heads dim"`. `1` is a dimension of one
            element. Default: as they are.
        sizes: Sizes of axes that one dimension consists of. Those that the tree's shapes or the
            other axes give may be left out. `sizes={"out": (4096, 1024, 1024)}` has one size per
            part, where parts are of several sizes.
        words: Per axis that stacks or takes apart, the words in their order that the names have for
            it: `{"part": ("q", "k", "v")}`. None leaves out what is taken apart there. Default:
            numbers from 0 on, none of which may lack.
        dtype: The dtype that the arrays get, whatever `dtype` of the call is. Default: the
            checkpoint's.
        optional: Whether it may be that no array has such a name, as in records for several models.
            Default: that is an error.
        shared: Whether the records after this one may make further arrays of the same array, as of
            embeddings that are the head, too. Default: False.
        resize: Per axis that is a dimension of the result, its size there, or None for that of the
            tree: elements at the end are left out, or zeros added.

    Raises:
        ValueError: The record contradicts itself.
        re.error: The pattern or the replacement is invalid.

    Example:
        >>> import shardrules as sr
        >>> sr.Rename(
        ...     r"^model\.layers\.(?P<layer>\d+)\.self_attn\.q_proj\.weight$",
        ...     "layers/attn/query/kernel",
        ...     "(heads head_dim) embed -> layer embed heads head_dim",
        ...     sizes={"head_dim": 128},
        ... ).path
        'layers/attn/query/kernel'
    """

    pattern: str | re.Pattern[str]
    path: str | None
    dims: str | None = None
    sizes: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict, hash=False)
    words: Mapping[str, tuple[str | int | None, ...]] = field(default_factory=dict, hash=False)
    dtype: Any = None
    optional: bool = field(default=False, kw_only=True)
    shared: bool = field(default=False, kw_only=True)
    resize: Mapping[str, int | None] = field(default_factory=dict, hash=False, kw_only=True)

    __repr__ = without_defaults

    def __post_init__(self) -> None:
        check_type("pattern", self.pattern, str | re.Pattern, "a pattern")
        check_type("path", self.path, str | None, "a string, or None to leave the array out")
        check_type("dims", self.dims, str | None, "a string such as 'out in -> in out', or None")
        boolean("optional", self.optional)
        if boolean("shared", self.shared) and self.path is None:
            raise ValueError("shared is for records that make an array: give a path, too")
        if self.path is not None:
            check_template(self.pattern, self.path)
        _set(self, "sizes", _checked_sizes(self.sizes))
        _set(self, "words", _checked_words(self.words))
        _set(self, "resize", _checked_resize(self.resize))
        if self.dtype is not None:
            _set(self, "dtype", given_name("dtype", self.dtype))
        if self.arrangement is not None:
            self._check_axes(self.arrangement)
        elif self.sizes or self.words.keys() - numbered_axes(self) or self.resize:
            raise ValueError("sizes, words and resize are for the axes of dims: give dims, too")

    def _check_axes(self, dims: Arrangement) -> None:
        stacked = stacked_axes(self)
        for axis in dims.stacked:
            if axis not in stacked and not isinstance(self.sizes.get(axis), int):
                near = nearest(axis, dims.unstacked, SLIP)
                meant = f"; did you mean {near!r}, on the left?" if near else ""
                raise ValueError(
                    f"dims {self.dims!r} stacks along {axis!r}, for which the pattern needs a "
                    f"group: (?P<{axis}>[0-9]+){meant}; to repeat along it, give its size in sizes"
                )
        for group in dims.target:
            if inner := {*stacked}.intersection(group[1:]):
                raise ValueError(
                    f"dims {self.dims!r} stacks along {min(inner)!r}, so it must be the first of "
                    "its dimension"
                )
        for axis in dims.unstacked:
            if f"{{{axis}}}" not in (self.path or ""):
                raise ValueError(
                    f"dims {self.dims!r} takes arrays apart along {axis!r}, so the path needs "
                    f"{{{axis}}}; it is {self.path!r}"
                )
        axes = {axis for groups in dims for group in groups for axis in group}
        axes.update(numbered_axes(self))
        for name, values in (("sizes", self.sizes), ("words", self.words), ("resize", self.resize)):
            if unknown := values.keys() - axes:
                raise ValueError(f"{name} has {min(unknown)!r}, which is no axis of {self.dims!r}")
        self._check_words(dims, stacked)

    def _check_words(self, dims: Arrangement, stacked: tuple[str, ...]) -> None:
        for axis, row in self.words.items():
            if axis not in (*stacked, *dims.unstacked, *numbered_axes(self)):
                raise ValueError(f"words has {axis!r}, which is on both sides of {self.dims!r}")
            if None in row and axis in stacked:
                raise ValueError(f"words[{axis!r}] has None, and {self.dims!r} stacks along it")
        for axis in self.resize:
            if (axis,) not in dims.target or axis in stacked:
                raise ValueError(
                    f"resize has {axis!r}, which is no dimension of the result of {self.dims!r}"
                )

    @property
    def arrangement(self) -> Arrangement | None:
        """Return the meaning of `dims`; None if the dimensions stay as they are."""
        return None if self.dims is None else arrangement(self.dims)


def stacked_axes(rename: Rename) -> tuple[str, ...]:
    """Return the axes along which arrays are stacked, by a group of the pattern."""
    dims = rename.arrangement
    groups = re.compile(rename.pattern).groupindex
    return () if dims is None else tuple(axis for axis in dims.stacked if axis in groups)


def numbered_axes(rename: Rename) -> tuple[str, ...]:
    """Return the groups of the pattern that the path numbers."""
    groups = re.compile(rename.pattern).groupindex
    return tuple(axis for axis in groups if f"{{{axis}}}" in (rename.path or ""))


def texts_of(renames: Sequence[Rename]) -> list[str]:
    """Return texts that are the same in all processes."""
    return list(map(repr, renames))


def _set(record: Rename, name: str, value: Any) -> None:
    object.__setattr__(record, name, value)


def _integers(name: str, values: Any) -> tuple[int, ...]:
    rows = as_tuple(name, values, "integers")
    return tuple(integer(f"{name}[{i}]", value, 1) for i, value in enumerate(rows))


def _checked_sizes(sizes: Any) -> dict[str, int | tuple[int, ...]]:
    check_type("sizes", sizes, Mapping, "a dict such as {'head_dim': 128}")
    return {
        axis: _integers(f"sizes[{axis!r}]", size)
        if isinstance(size, tuple | list)
        else integer(f"sizes[{axis!r}]", size, 1)
        for axis, size in sizes.items()
    }


def _checked_resize(sizes: Any) -> dict[str, int | None]:
    check_type("resize", sizes, Mapping, "a dict such as {'vocab': 128256}, or of None")
    return {
        axis: None if size is None else integer(f"resize[{axis!r}]", size, 1)
        for axis, size in sizes.items()
    }


def _checked_words(words: Any) -> dict[str, tuple[str | int | None, ...]]:
    check_type("words", words, Mapping, "a dict such as {'part': ('q', 'k', 'v')}")
    checked = {axis: as_tuple(f"words[{axis!r}]", row, "words") for axis, row in words.items()}
    for axis, row in checked.items():
        for word in row:
            check_type(f"words[{axis!r}]", word, str | int | None, "words, numbers or None")
        names = [str(word) for word in row if word is not None]
        if len({*names}) < len(names):
            raise ValueError(f"words[{axis!r}] has a word twice: {shown(row)}")
    return checked
