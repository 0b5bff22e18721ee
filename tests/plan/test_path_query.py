"""What `explain` takes beside a path: folded paths, globs, ends of paths; and what it refuses."""

from __future__ import annotations

import jax
import pytest

import shardrules as sr

LEAF = jax.ShapeDtypeStruct((8, 8), "bfloat16")


@pytest.fixture(scope="module")
def plan():
    layer = {"mlp": {"w": LEAF, "b": LEAF}, "[x]": LEAF}
    tree = {"layers": [layer] * 12, "{0..2}": LEAF, "head": {"w": LEAF}, "opt": {"head": LEAF}}
    return sr.plan(tree, [("mlp", "tp"), ("", ())], {"tp": 2})


@pytest.mark.parametrize(
    ("asked", "path", "leaves"),
    [
        ("layers/7/mlp/w", "layers/7/mlp/w", 1),
        ("layers/{0..11}/mlp/w", "layers/0/mlp/w", 12),  # as the table has it
        ("mlp/w", "layers/0/mlp/w", 12),
        ("/b", "layers/0/mlp/b", 12),
        ("1/mlp/w", "layers/1/mlp/w", 1),  # not of layer 11
        ("layers/*/w", "layers/0/mlp/w", 12),
        ("layers/?/mlp/w", "layers/0/mlp/w", 10),
        ("layers/1?/mlp/w", "layers/10/mlp/w", 2),
        ("[x]", "layers/0/[x]", 12),
        ("{0..2}", "{0..2}", 1),
        ("{{0..2}}", "{0..2}", 1),
        ("head/w", "head/w", 1),
        ("h*w", "head/w", 1),  # whole paths come before ends
    ],
)
def test_what_is_meant(plan, asked, path, leaves):
    found = plan.explain(asked)
    assert (found.path, found.leaves) == (path, leaves)
    assert found == plan.explain(path)._replace(leaves=leaves)
    assert (f"\n  the first of {leaves} leaves\n" in str(found)) is (leaves > 1)


def test_what_is_ambiguous_is_an_error_with_the_candidates(plan):
    with pytest.raises(KeyError) as info:
        plan.explain("w")
    assert info.value.args == (
        "'w' is ambiguous: it may be any of 2 folded paths: layers/{0..11}/mlp/w, head/w; give more of the path",
    )
    with pytest.raises(KeyError, match="any of 2 folded paths: head/w, opt/head; give more"):
        plan.explain("*he*d*")
    names = {f"{chr(97 + i)}{chr(98 + i)}": {"w": LEAF} for i in range(15)}
    with pytest.raises(KeyError, match="15 folded paths: ab/w, .* and 5 more paths; give more"):
        sr.plan(names, [("", ())], {"tp": 2}).explain("w")


NOWHERE = ("lp/b", "{12..99}/mlp/w", "layers/*/mlp/wx", "layers/{2..11}/mlp/w", "{0..11}/mlp/w", "{1..2..3}/mlp/w")


@pytest.mark.parametrize("asked", NOWHERE)
def test_what_is_nowhere_is_an_error_with_near_paths(plan, asked):
    with pytest.raises(KeyError) as info:
        plan.explain(asked)
    end = "b" if asked.endswith("b") else "w"
    assert str(info.value).startswith(f"no leaf has the path {asked!r}; near it: layers/{{0..11}}/mlp/{end}")


@pytest.mark.parametrize("asked", ["", ".", "{,}", "\0"])
def test_what_means_nothing(plan, asked):
    with pytest.raises(KeyError, match="no leaf has the path .*; a glob such as"):
        plan.explain(asked)


def test_programs_ask_for_one_path(plan):
    """A leaf that goes must not become another's answer."""
    with pytest.raises(KeyError, match=r"'mlp/w'; near it: layers/\{0\.\.11\}/mlp/w"):
        plan.kind("mlp/w")


def test_paths_of_other_dialects():
    tree = {"model": [{"up": {"w": LEAF}}] * 3, "head": LEAF}
    plan = sr.plan(tree, sr.Rules([("", "tp")], sr.dialects.KEYSTR), {"tp": 2})
    for asked in ("['up']['w']", "['model'][*]['up']['w']"):
        found = plan.explain(asked)
        assert (found.path, found.leaves) == ("['model'][0]['up']['w']", 3)


def test_the_keys_of_jax_are_told_to_be_a_string():
    tree = {"layers": [{"w": LEAF}]}
    plan = sr.plan(tree, [("w", ())], {"tp": 2})
    ((keys, _),) = jax.tree_util.tree_leaves_with_path(tree)
    with pytest.raises(TypeError, match=r"as in plan\.paths, such as 'layers/0/w' for JAX"):
        plan.explain(keys)
    assert plan.explain("layers/0/w").path == plan.paths[0]
