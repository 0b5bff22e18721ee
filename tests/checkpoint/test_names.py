"""Names as templates: what they find, what they make of it, both ways; and what is refused."""

from __future__ import annotations

import re
import time

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint.names import backwards, forwards
from tests.checkpoint.test_layouts import check, flat, numbers
from tests.checkpoint.test_load import bits, mesh_of

# By a name: the templates, the path; each pair leads back, too.
PAIRS = {
    "model.norm.weight": ("model.norm.weight", "norm/scale", "norm/scale"),
    "model.layers.3.mlp.up_proj.weight": (
        "model.layers.{layer}.mlp.{part:gate_proj|up_proj}.weight",
        "layers/{layer}/mlp/{part}/kernel",
        "layers/3/mlp/up_proj/kernel",
    ),
    "h.11.q_proj": ("h.{i}.{part}_proj", "{part}/{i}", "q/11"),
    "h.0.up": ("h.{i}.{part:gate|up}", "h/{i}/{part:wi_0|wi_1}", "h/0/wi_1"),
    "a.b.c.weight": ("{module*}.weight", "{module*}/kernel", "a/b/c/kernel"),
    "model.decoder.w": ("model.{rest*}", "{rest*}", "decoder.w"),
    "x.{a}.w": ("x.{{a}}.{p}", "x/{p}/{{}}", "x/w/{}"),
    "a(b)+.w": ("a(b)+.{p}", "{p}", "w"),
    "up_0": ("{part:up|up_0|down}_0", "{part}/0", "up/0"),
    "{{0": ("{{{{{i}", "{i}", "0"),
    "xa.b": ("x{rest*}", "{rest*}", "a.b"),
    "dimensional/x": ("dimensional/{p}", "{p}", "x"),
    "é.\n.w": ("{p}.\n.w", "{p}", "é"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_name_becomes_a_path_and_a_name_again(name):
    template, path_template, path = PAIRS[name]
    renames = [sr.Rename(template, path_template)]
    (record,), (back,) = forwards(renames), backwards(renames)
    assert record.path(record.values(name), {}) == path
    assert back.path(back.values(path), {}) == name


OTHERS = {
    "layers.{i}.w": ["layers.0.1.w", "layers.0/1.w", "layers..w", "xlayers.0.w", "layers.0.w.x", "layersx0xw", "layers.0.w\n"],
    "{p:a|b}.w": ["c.w", "ab.w"], "{rest*}.w": [".w", "a..w"],
}  # fmt: skip


@pytest.mark.parametrize(("template", "name"), [(template, name) for template in OTHERS for name in OTHERS[template]])
def test_a_template_is_the_whole_of_a_name(template, name):
    (record,) = forwards([sr.Rename(template, None)])
    assert record.values(name) is None


def test_names_of_any_length_take_no_time():
    renames = [sr.Rename("{a}.{b*}.{c}_d.x", "{a}/{b*}/{c}")]
    (record,) = forwards(renames)
    start = time.process_time()
    assert record.values("a." * 5000 + "_" * 5000) is None
    assert time.process_time() - start < 5


WRONG = {
    "a field of the path alone": (lambda: sr.Rename("h.w", "x/{layer}"), "{layer} is in path 'x/{layer}' alone; write it on the other"),
    "a field of the name alone": (lambda: sr.Rename("h.{i}.w", "x"), "{i} is in name 'h.{i}.w' alone"),
    "a word of two parts": (lambda: sr.Rename("{a:x|x.y}.{b}", "{a}/{b}"), "{a:x|x.y} has a word twice, an empty one, or one with a sep"),
    "a field twice": (lambda: sr.Rename("{a}.{a}", "{a}"), "has {a} twice"),
    "an open brace": (lambda: sr.Rename("{a", "a"), "'{' is alone; write {{"),
    "no name of a field": (lambda: sr.Rename("{0}", "a"), "{0} is no field; write a name in braces"),
    "words twice": (lambda: sr.Rename("{a:x|x}", "{a}"), "has a word twice, an empty one"),
    "an empty word": (lambda: sr.Rename("{a:x|}", "{a}"), "has a word twice, an empty one"),
    "words that are not as many": (lambda: sr.Rename("{a:x|y}", "{a:x|y|z}"), "{a} is not alike in name and path: give as many words"),
    "many on one side": (lambda: sr.Rename("{a*}.w", "{a}/w"), "{a} is not alike in name and path: give as many words, or a *"),
    "two in a part": (lambda: sr.Rename("{a}_{b:c|d}.w", "{a}/{b}"), "name '{a}_{b:c|d}.w' has two fields in a part; write a Rename"),
    "many and many": (lambda: sr.Rename("{a*}.{b*}", "{a*}/{b*}"), "has two fields with a *"),
    "a field that stacks, in the path": (lambda: sr.Rename("{i}.w", "{i}/w", "a -> i a"), "and dims cannot stack or take apart along it"),
    "no field to stack by": (lambda: sr.Rename("w", "w", "a -> layer a"), "the name needs a field {layer}"),
    "nothing says how often": (lambda: sr.Rename("x", "y", "a -> times a"), "to repeat along it, give its size in sizes"),
    "a stack inside": (lambda: sr.Rename("x{layer}", "y", "a -> (a layer)"), "so it must be the first of its dimension"),
    "apart inside": (lambda: sr.Rename("x", "{b:1|2}", "(a b) c -> a c"), "apart along 'b', so it must be the first of its dimension"),
    "apart without a field": (lambda: sr.Rename("x", "y", "a b -> a"), "the path needs a field {b}; or write it on the right"),
    "no arrow": (lambda: sr.Rename("x", "y", "out in"), "must have one '->'"),
    "an axis twice": (lambda: sr.Rename("x", "y", "a a -> a"), "has the axis 'a' twice"),
    "a misspelt axis": (lambda: sr.Rename("wq", "q", "out in -> in outt"), "did you mean 'out'"),
    "resize of a part": (lambda: sr.Rename("x", "y", "a b -> (a b)", resize={"a": 8}), "resize has 'a': 8, which is no dimension"),
    "resize of nothing": (lambda: sr.Rename("x", "y", "a b -> a b", resize={"c": 8}), "resize has 'c': 8, which is no dimension"),
    "resize without dims": (lambda: sr.Rename("x", "y", resize={"c": 8}), "sizes and resize are for the axes of dims"),
    "shared and left out": (lambda: sr.Rename("x", None, shared=True), "shared is for records that make an array"),
    "a dtype of nothing": (lambda: sr.Rename("x", None, dtype="float32"), "are for records with a path"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_contradicts_itself(case):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


FOUND = [
    # (names, renames, paths)
    (["a.w", "b.w", "c"], [sr.Rename("a.{p}", "x.{p}"), sr.Rename("{m}.w", "{m}.v")], ["b.v", "c", "x.w"]),
    (["w"], [sr.Rename("w", "x"), sr.Rename("{p}", "other.{p}")], ["x"]),  # one that comes too late is no error
    (["a.w", "b"], [sr.Rename("{p}.w", None)], ["b"]),
    # Many parts have the separators of their side; a template without one leaves them.
    (["model.decoder.w", "model.norm"], [sr.Rename("model.{rest*}", "{rest*}")], ["decoder.w", "norm"]),
    (["model.decoder.w", "model.norm"], [sr.Rename("model.{rest*}", "p/{rest*}")], ["p/decoder/w", "p/norm"]),
]


@pytest.mark.parametrize(("names", "renames", "paths"), FOUND)
def test_the_first_record_counts_and_others_stay(save, names, renames, paths):
    loaded = sr.load(save({name: numbers(2) for name in names}), P(), mesh_of(), renames=renames)
    assert list(flat(loaded)) == paths


def test_numbers_with_zeros_before_them_are_words(save, tmp_path):
    """Backwards they came without the zeros."""
    path = save({f"h.{i:02}": numbers(2, start=i) for i in range(3)})
    with pytest.raises(sr.FileError, match="'00' is no number along 'i'; give the words in their"):
        sr.load(path, P(), mesh_of(), renames=[sr.Rename("h.{i}", "h", "a -> i a")])
    renames = [sr.Rename("h.{i:00|01|02}", "h", "a -> i a")]
    sr.save(sr.load(path, P(), mesh_of(), renames=renames), tmp_path / "n", renames=renames)
    assert list(sr.read_model(tmp_path / "n")) == ["h.00", "h.01", "h.02"]


class TestShared:
    HEAD = sr.Rename("embed.w", "head.w", "v e -> e v", shared=True)
    EMBED = numbers(16, 8)

    def test_the_array_stays_what_it_is(self, save):
        for door, source in ((sr.load, save({"embed.w": self.EMBED})), (sr.reshard, {"embed.w": self.EMBED})):
            made = door(source, P("tp"), mesh_of(), renames=[self.HEAD])
            check(made, {"embed.w": self.EMBED, "head.w": self.EMBED.T})

    @pytest.mark.parametrize(("path", "also"), [("table", ["table"]), (None, [])])
    def test_later_records_count_for_it(self, save, path, also):
        renames = [self.HEAD, sr.Rename("embed.w", path)]
        made = sr.load(save({"embed.w": self.EMBED}), P(), mesh_of(), renames=renames)
        assert list(made) == ["head.w", *also]

    def test_a_shared_name_that_exists_too_is_the_checkpoints_own(self, save, tmp_path):
        arrays = {"embed.w": self.EMBED, "head.w": numbers(8, 16, start=5)}
        made = sr.load(save(arrays), P(), mesh_of(), renames=[self.HEAD])
        check(made, arrays)
        sr.save(made, tmp_path / "n", renames=[self.HEAD, sr.Rename("{rest*}", "{rest*}")])
        check(sr.load(tmp_path / "n", P(), mesh_of()), arrays)

    def test_a_copy_is_not_saved_and_one_that_is_another_now_is_not_lost(self, save, tmp_path):
        renames = [self.HEAD, sr.Rename("embed.w", "embed.w")]
        made = sr.load(save({"embed.w": self.EMBED}), P(), mesh_of(), renames=renames)
        sr.save(made, tmp_path / "n", renames=renames)
        check(sr.load(tmp_path / "n", P(), mesh_of()), {"embed.w": self.EMBED})
        made["head.w"] += 1
        with pytest.raises(ValueError, match=r"head.w is no copy of embed.w any more"):
            sr.save(made, tmp_path / "m", renames=renames)
        assert not (tmp_path / "m").exists()


class TestBackwards:
    """`save` with the list of `load`; layouts are in test_layouts.py."""

    LOST = (
        (sr.Rename("x", None), "it leaves arrays out; give optional=True"),
        (sr.Rename("x", "y", "a -> n a", sizes={"n": 2}), "it repeats along n"),
        (sr.Rename("x", "y", "a -> a", resize={"a": 2}), "resize does not tell the old size"),
        (sr.Rename("x", "y", dtype="bfloat16"), "dtype bfloat16 may have rounded"),
    )
    OTHERS = (
        # It wrote half-renamed checkpoints.
        ({"norm": numbers(2), "layers": {"0": {"w": numbers(2, 2)}}},
         [sr.Rename("model.norm", "norm"), sr.Rename("h.{i}.w", "layers/w", "a -> i a", optional=True)], "layers/0/w: left over: no Rename finds it"),
        # `load` would turn it into another path.
        ({"x": numbers(2)}, [sr.Rename("x", "y", optional=True), sr.Rename("{p}", "{p}")],
         "x: it would become 'x', which these renames turn into an"),
        *(({"y": numbers(2)}, [rename], f"cannot go back: {reason}") for rename, reason in LOST),
    )  # fmt: skip

    @pytest.mark.parametrize(("tree", "renames", "reason"), OTHERS)
    def test_what_does_not_come_back_is_an_error(self, tmp_path, tree, renames, reason):
        with pytest.raises(ValueError, match=reason):
            sr.save(tree, tmp_path / "m", renames=renames)
        assert not list(tmp_path.iterdir())

    def test_what_some_models_have_and_was_left_out_stays_out(self, tmp_path):
        renames = [sr.Rename("buffer", None, optional=True), sr.Rename("w", "v")]
        sr.save({"v": numbers(2)}, tmp_path / "m", renames=renames)
        assert list(sr.read_model(tmp_path / "m")) == ["w"]

    def test_a_separator_that_no_name_has_is_not_guessed(self, save, tmp_path):
        """`a.b` came back as `a/b`."""
        path, whole = save({"a.b": numbers(2)}), sr.Rename("{rest*}", "p/{rest*}")
        made = sr.load(path, P(), mesh_of(), renames=[whole])
        with pytest.raises(ValueError, match="does not tell what '/' stands for"):
            sr.save(made, tmp_path / "n", renames=[whole])
        assert not (tmp_path / "n").exists()
        told = [sr.Rename("{first}.{rest*}", "p/{first}/{rest*}")]
        sr.save(made, tmp_path / "n", renames=told)
        assert list(sr.read_model(tmp_path / "n")) == ["a.b"]

    def test_a_leaf_called_value_is_no_box(self, tmp_path):
        tree = {"attn": {part: numbers(2, start=i) for i, part in enumerate(("key", "value"))}}
        renames = [sr.Rename("h.{part:k|v}", "attn/{part:key|value}")]
        sr.save(tree, tmp_path / "m", renames=renames)
        again = sr.load(tmp_path / "m", P(), mesh_of(), renames=renames)
        assert bits(again["attn"]["value"]) == bits(tree["attn"]["value"])

    def test_a_state_of_nnx(self, save, tmp_path):
        nnx = pytest.importorskip("flax.nnx")
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        renames = [sr.Rename("up.weight", "kernel", "out in -> in out"), sr.Rename("up.bias", "bias")]
        sr.save(nnx.state(model), tmp_path / "m", renames=renames)
        again = sr.load(tmp_path / "m", P(), mesh_of(), tree=jax.eval_shape(lambda: nnx.state(model)), renames=renames)
        assert jax.tree.structure(again) == jax.tree.structure(nnx.state(model))
        assert bits(*jax.tree.leaves(again)[1:]) == bits(*jax.tree.leaves(nnx.state(model))[1:])
