"""`suggest`: rules for models that no manifest has, in every dialect, and for hostile trees."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import models
from tests.support.models import array
from tests.support.slow import slow

MESH = {"fsdp": 8, "tp": 4}


def specs(suggestion):
    return {pattern: tuple(getattr(spec, "spec", spec)) for pattern, spec in suggestion.rules}


def assert_proven(suggestion):
    """Each leaf has its own rule, none is a catch-all or dead, and the check is clean."""
    findings = suggestion.plan.check(**suggestion.declared)
    assert not findings.at_least("warning"), findings
    coverage = suggestion.plan.coverage
    assert coverage.unmatched == 0
    assert not coverage.dead
    assert not coverage.shadowed
    for reason in suggestion.reasons:
        assert coverage.won[reason.rule] == reason.leaves
        assert len(suggestion.rules.all_matches("~")) == 0


class TestModels:
    def test_a_transformer_gets_the_rules_that_an_expert_writes(self):
        found = sr.suggest(models.llama(), MESH)
        assert specs(found) == {
            "embed_tokens/embedding": ("tp", "fsdp"),
            "self_attn/(q|k|v)_proj/kernel": ("fsdp", "tp"),
            "self_attn/o_proj/kernel": ("tp", "fsdp"),
            "mlp/(gate|up)_proj/kernel": ("fsdp", "tp"),
            "mlp/down_proj/kernel": ("tp", "fsdp"),
            "lm_head/kernel": ("fsdp", "tp"),
            "scale": (),
        }
        assert_proven(found)
        assert found.unknown == ()

    def test_names_do_not_matter_where_shapes_tell(self):
        tree = {f"b{i}": {"x": models.kernel(64, 256), "y": models.kernel(256, 64), "z": array(64)} for i in range(8)}
        tree |= {"first": models.kernel(1000, 64), "last": {"z": array(64)}}
        found = specs(sr.suggest(tree, MESH))
        assert found["x/kernel"] == ("fsdp", "tp")
        assert found["y/kernel"] == ("tp", "fsdp")

    @pytest.mark.parametrize("mesh", [MESH, {"fsdp": 64}, {"tp": 8}, {"dp": 2, "fsdp": 2, "tp": 8}])
    @pytest.mark.parametrize(
        "model",
        [
            models.mamba, models.gemma, models.diffusion_transformer, models.siglip, models.gpt_oss,
            models.resnet, models.graph_network,
        ],
    )  # fmt: skip
    def test_models_that_no_manifest_has(self, model, mesh):
        found = sr.suggest(model(), mesh)
        assert_proven(found)
        assert len(found.rules) <= 30

    @pytest.mark.parametrize(
        ("model", "some"),
        [
            (models.mamba, {"mixer/(in|dt)_proj/weight": ("tp", "fsdp"), "mixer/(x|out)_proj/weight": ("fsdp", "tp")}),
            (models.gemma, {
                "attn/q_einsum/w": ("tp", "fsdp"), "attn/kv_einsum/w": (None, "tp", "fsdp"),
                "attn/attn_vec_einsum/w": ("tp", None, "fsdp"), "mlp/linear/w": ("tp", "fsdp"),
                "mlp/gating_einsum/w": (None, "fsdp", "tp")}),
            (models.diffusion_transformer, {
                "attn/qkv/weight": ("tp", "fsdp"), "attn/proj/weight": ("fsdp", "tp"),
                "mlp/fc2/weight": ("fsdp", "tp")}),
            (models.siglip, {
                "MlpBlock_0/Dense_0/kernel": (None, "fsdp", "tp"),
                "MultiHeadDotProductAttention_0/(query|key|value)/kernel": (None, "fsdp", "tp"),
                "MultiHeadDotProductAttention_0/out/kernel": (None, "tp", None, "fsdp")}),
            (models.graph_network, {"mlp/3/weight": (None, "fsdp")}),
        ],
    )  # fmt: skip
    def test_roles_follow_from_shapes(self, model, some):
        mesh = {"fsdp": 8} if model is models.graph_network else MESH
        found = specs(sr.suggest(model(), mesh))
        assert {pattern: found[pattern] for pattern in some} == some

    def test_experts_are_cut_by_their_axis_and_all_else_as_by_fsdp(self):
        found = specs(sr.suggest(models.gpt_oss(), {"fsdp": 4, "ep": 8, "tp": 2}))
        assert found["/mlp/experts/(gate_up|down)_proj$"] == ("ep", "fsdp", "tp")
        assert found["self_attn/(q|k|v)_proj/weight"] == ("tp", ("fsdp", "ep"))

    def test_lora_and_optimizer_state_in_the_tree(self):
        params = models.llama(lora=16)
        found = sr.suggest({"params": params, "opt_state": [{"mu": params, "nu": params}]}, MESH)
        assert_proven(found)
        assert specs(found)["self_attn/(q|k|v)_proj/kernel"] == ("fsdp", "tp")
        assert len(found.rules) <= 12

    def test_axes_mean_what_they_are_called(self):
        found = sr.suggest(models.llama(), {"data": 2, "model": 4, "seq": 2})
        assert specs(found)["mlp/down_proj/kernel"] == ("model",)
        assert found.declared["data_axes"] == ("data", "seq")
        only_data = sr.suggest(models.llama(), {"data": 8})
        assert specs(only_data)["mlp/down_proj/kernel"] == (None, "data")
        strange = sr.suggest(models.llama(), {"x": 8})
        assert specs(strange)["mlp/down_proj/kernel"] == (None, "x")


class TestHeads:
    @pytest.mark.parametrize(
        ("given", "model"), [({"head_dim": 128}, models.llama()), ({}, models.llama(head_norm=128))]
    )
    def test_heads_are_not_cut_apart(self, given, model):
        # 8 heads of keys do not go on 16 devices: these are whole, and no sum is sent for them.
        found = sr.suggest(model, {"fsdp": 4, "tp": 16}, **given)
        rules = dict(found.rules)
        assert tuple(rules["self_attn/(k|v)_proj/kernel"]) == ("fsdp",)
        assert rules["self_attn/q_proj/kernel"] == sr.RuleSpec(("fsdp", "tp"), units=(1, 128))
        assert not found.plan.check(**found.declared, **given).at_least("warning")

    def test_a_dimension_of_its_own_is_not_cut_by_tensor_axes(self):
        found = sr.suggest(models.gemma(), {"tp": 16})
        assert specs(found)["attn/kv_einsum/w"] == ()
        assert_proven(found)
        assert specs(sr.suggest(models.gemma(), {"tp": 8}))["attn/kv_einsum/w"] == (None, "tp")


class TestWords:
    def test_the_same_words_with_other_numbers_may_have_other_specs(self):
        tree = {
            "layers": {str(i): {"up": models.kernel(64, 250 if i == 3 else 256), "norm": array(64)} for i in range(12)}
        }
        found = sr.suggest(tree, {"tp": 4})
        assert list(specs(found).items())[:2] == [
            ("layers/3/up/kernel", ("tp",)),
            (r"layers/\d+/up/kernel", (None, "tp")),
        ]
        findings = found.plan.check(**found.declared)
        assert [one.kind for one in findings.at_least("warning")] == []

    def test_numbers_in_names_are_names_unless_they_count_many(self):
        tree = {f"block_{i}": {"w1": models.kernel(64, 64), "w2": models.kernel(64, 64)} for i in range(9)}
        found = sr.suggest(tree, {"tp": 4})
        assert specs(found) == {"w1/kernel": (None, "tp"), "w2/kernel": ("tp",)}

    def test_names_that_only_some_numbers_complete_are_told_apart(self):
        # The end of xa5 is a5, and no sign of it is in the first of the leaves, xa0.
        tree = {f"xa{i}": {"w": array(64, 256)} for i in range(9)}
        tree |= {"a5": {"w": array(256, 64)}}
        found = sr.suggest(tree, MESH)
        assert [one.leaves for one in found.reasons] == list(found.plan.coverage.won)
        assert found.plan.kind("a5/w").spec == ("tp", "fsdp")
        assert found.plan.kind("xa5/w").spec == ("fsdp", "tp")

    def test_regex_characters_and_empty_keys_are_text(self):
        tree = {
            "a.*b": {"k+[(": array(64, 256)},
            "a|b": {"k+[(": array(256, 64)},
            "^$": array(64, 64),
            "": array(64),
            "é键": {"w\\d": array(64, 64)},
            "x\ny": array(64, 64),
            "it's": {'"q"': array(64, 64)},
            "##[cmd]": array(128, 64),
            "w": {"": array(8), "a": array(64, 256)},
        }
        found = sr.suggest(tree, MESH)
        assert_proven(found)
        assert all(line.isprintable() for line in str(found).splitlines())

    def test_two_leaves_with_one_path_are_refused(self):
        tree = {"a/w": array(64, 256), "a": {"w": array(256, 64)}}
        with pytest.raises(ValueError, match="two leaves have the path 'a/w'.*rename"):
            sr.suggest(tree, MESH)

    def test_too_many_names_are_refused(self):
        tree = {f"n{i:x}x{i:o}": array(64, 64) for i in range(100000, 105000)}
        names = random.Random(0)
        tree = {f"{names.getrandbits(64):x}": array(64, 64) for _ in tree}
        with pytest.raises(ValueError, match=r"paths that differ not only in numbers.*fsdp\(axis\)"):
            sr.suggest(tree, MESH)

    def test_names_that_have_nothing_in_common_are_refused(self):
        names = random.Random(0)
        tree = {f"{names.getrandbits(64):x}": array(64, 64) for _ in range(200)}
        with pytest.raises(ValueError, match=r"200 paths, such as .* too many names for rules.*fsdp\(axis\)"):
            sr.suggest(tree, MESH, dialect=sr.dialects.KERAS)

    @pytest.mark.parametrize(
        "tree",
        [
            {},
            array(64, 64),
            array(),
            {"bias": array(64), "count": array()},
            {f"l{p}": models.kernel(p, q) for p, q in [(7, 13), (17, 19), (101, 103)]},
        ],
        ids=["empty", "one leaf", "scalar", "no matrices", "primes"],
    )
    def test_little_trees(self, tree):
        found = sr.suggest(tree, MESH)
        assert not found.plan.check(**found.declared).at_least("warning")
        assert found.plan.coverage.unmatched == 0


DIALECTS = [
    sr.dialects.EFORMER, sr.dialects.EASYLM, sr.dialects.KEYSTR, sr.dialects.KERAS, sr.dialects.BIG_VISION, sr.dialects.SPECTRAX, sr.dialects.NNX,
]  # fmt: skip


def cut(spec):
    """The dimensions that are cut, and the axes."""
    return {dim: entry for dim, entry in enumerate(spec) if entry is not None}


class TestDialects:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
    def test_every_dialect_gives_each_leaf_the_same_spec(self, dialect):
        tree = models.llama(lora=16)
        found = sr.suggest(tree, MESH, dialect=dialect)
        assert found.rules.dialect == dialect
        # By their own path through a real tree, not by paths alone.
        same = sr.suggest(tree, MESH).rules
        plans = [sr.plan(tree, rules, MESH) for rules in (found.rules, same)]
        first, second = ([cut(plan.kinds[kind].spec) for kind in plan.kind_of] for plan in plans)
        assert first == second
        coverage = found.plan.coverage
        assert not coverage.dead
        assert coverage.unmatched == 0

    def test_patterns_are_as_the_dialect_writes_them(self):
        first = {
            dialect: sr.suggest(models.llama(), MESH, dialect=dialect).rules[2][0]
            for dialect in (sr.dialects.KEYSTR, sr.dialects.KERAS)
        }
        assert first == {
            sr.dialects.KEYSTR: r"self_attn'\]\['o_proj'\]\['kernel'\]",
            sr.dialects.KERAS: ".*self_attn/o_proj/kernel",
        }


class TestMesh:
    def test_the_mesh_is_chosen_by_a_sweep(self):
        found = sr.suggest(models.llama(), devices=16, axes=("fsdp", "tp"))
        assert list(found.mesh) == ["fsdp", "tp"]
        assert found.plan.devices == 16
        assert_proven(found)

    def test_experts_make_an_axis_for_themselves(self):
        assert list(sr.suggest(models.gpt_oss(), devices=16).mesh) == ["fsdp", "tp", "ep"]

    def test_wrong_combinations_are_refused(self):
        with pytest.raises(ValueError, match="mesh or devices, not both"):
            sr.suggest(models.llama(), MESH, devices=8)
        with pytest.raises(ValueError, match="give devices as well"):
            sr.suggest(models.llama(), MESH, axes=("fsdp",))

    def test_a_plan_is_a_model(self):
        plan = sr.plan(models.llama(), [(".*", P())], MESH)
        assert sr.suggest(plan).rules == sr.suggest(models.llama(), MESH).rules
        on_other = sr.suggest(plan, {"fsdp": 8})
        assert on_other.rules == sr.suggest(models.llama(), {"fsdp": 8}).rules


class TestSuggestion:
    def test_reasons_say_which_dimension_is_what(self):
        reason = sr.suggest(models.llama(), MESH).reasons[1]
        assert reason.leaves == 12
        assert [(one.role, one.size, one.axes) for one in reason.dims] == [
            ("residual", 4096, ("fsdp",)),
            ("hidden", 4096, ("tp",)),
        ]
        assert "residual 4096 by fsdp, hidden 4096 by tp" in str(reason)

    def test_what_it_does_not_understand_it_says(self):
        tree = {f"b{i}": {"x": models.kernel(64, 64)} for i in range(8)}
        found = sr.suggest(tree, MESH)
        assert found.unknown == ("b{0..7}/x/kernel",)
        assert "not understood" in str(found)
        assert "not understood: b{0..7}/x/kernel" in found.to_toml()

    @pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
    def test_toml_is_read_as_the_same_rules(self, dialect, tmp_path):
        found = sr.suggest(models.llama(head_norm=128), {"dp": 2, **MESH}, dialect=dialect)
        file = tmp_path / "rules.toml"
        file.write_text(found.to_toml(), encoding="utf-8")
        read = sr.read_rules(file)
        assert read.rules == found.rules
        assert read.declared == found.declared
        plan = sr.plan(models.llama(head_norm=128), read.rules, {"dp": 2, **MESH})
        assert not plan.check(**read.declared).at_least("warning")

    @pytest.mark.parametrize("dialect", [sr.dialects.EFORMER, sr.dialects.KEYSTR], ids=lambda one: one.name)
    def test_python_makes_the_same_rules(self, dialect):
        found = sr.suggest(models.llama(head_norm=128), MESH, dialect=dialect)
        made = {}
        exec(found.to_python(), made)
        assert sr.Rules(made["rules"], dialect) == sr.Rules(
            [(p, P(*s) if isinstance(s, tuple) else sr.RuleSpec(P(*s.spec), units=s.units))
             for p, s in found.rules],
            dialect,
        )  # fmt: skip

    def test_hostile_names_stay_text_in_files(self):
        tree = {"##[cmd]\x1b": array(64, 64), "'\"\\\n": array(64, 256), "é\u202e": array(256, 64)}
        found = sr.suggest(tree, MESH)
        for text in (found.to_toml(), found.to_python()):
            assert "##[" not in text
            assert all(line.isprintable() for line in text.splitlines())
        read = tomllib.loads(found.to_toml())
        assert [one["pattern"] for one in read["rules"]] == [pattern for pattern, _ in found.rules]
        made = {}
        exec(found.to_python(), made)
        assert [pattern for pattern, _ in made["rules"]] == [pattern for pattern, _ in found.rules]

    def test_hostile_axes_stay_text_in_python(self):
        quote, command = 'a"b', "##[x]\x1b'"
        found = sr.suggest({"kernel": array(64, 256), "proj": array(256, 64)}, {quote: 2, command: 2})
        text = found.to_python()
        assert "##[" not in text
        assert all(line.isprintable() for line in text.splitlines())
        made = {}
        exec(text, made)
        assert made["rules"] == [(pattern, P(*spec)) for pattern, spec in found.rules]

    def test_a_dialect_of_ones_own_is_not_in_files(self):
        from dataclasses import replace

        own = replace(sr.dialects.EFORMER, name="own")
        with pytest.raises(ValueError, match="own is one of your own.*to_python"):
            sr.suggest(models.llama(), MESH, dialect=own).to_toml()


NAMES = ["layers", "0", "12", "w1", "w2", "w10", "kernel", "weight", "bias", "norm", "ln_1", "experts", "q_proj", "o_proj", "mlp", "up", "down", "embed", "a.b", "x/y", "[0]", "'", '"', "\\d+", "a|b", ".*", "^", "$", "(", "é", "block_3", "h", "value", "007", "a5", "##[x]", "{0..3}"]  # fmt: skip


def hostile_tree(choose, depth):
    if depth == 0 or choose.random() < 0.2:
        rank = choose.choice([0, 1, 1, 2, 2, 2, 3, 4])
        return array(*(choose.choice([1, 2, 3, 7, 16, 64, 256, 1000]) for _ in range(rank)))
    if choose.random() < 0.3:
        layer, name = hostile_tree(choose, depth - 1), choose.choice(["layers_{}", "{}", "b{}"])
        return {
            name.format(i): layer if choose.random() < 0.9 else hostile_tree(choose, depth - 1)
            for i in range(choose.randint(1, 12))
        }
    return {choose.choice(NAMES): hostile_tree(choose, depth - 1) for _ in range(choose.randint(1, 5))}


@pytest.mark.parametrize("seed", range(0, 120, 12))
def test_hostile_trees_are_decided_or_refused(seed):
    decided = 0
    for number in range(12):
        choose = random.Random(seed + number)
        tree = hostile_tree(choose, 5)
        dialect = choose.choice(DIALECTS)
        try:
            found = sr.suggest(tree, choose.choice([MESH, {"fsdp": 3}, {"ep": 2}]), dialect=dialect)
        except ValueError as error:
            assert re.search("rename|too many names|no rules", str(error)), error
            continue
        decided += 1
        coverage = found.plan.coverage
        assert (coverage.dead, coverage.unmatched) == ((), 0)
        assert [one.leaves for one in found.reasons] == list(coverage.won)
        assert not found.plan.check(**found.declared).at_least("error")
        read = tomllib.loads(found.to_toml())["rules"] if len(found.rules) else []
        assert len(read) == len(found.rules)
    assert decided >= 5


class TestTraining:
    """Real steps on 8 devices under suggested rules."""

    @pytest.mark.parametrize("sizes", [{"fsdp": 4, "tp": 2}, slow({"fsdp": 8}), slow({"tp": 8})])
    def test_a_transformer_is_as_planned_when_it_is_compiled(self, sizes):
        import jax
        import jax.numpy as jnp

        devices = np.array(jax.devices()[:8]).reshape(tuple(sizes.values()))
        mesh = jax.sharding.Mesh(devices, tuple(sizes))
        tree = models.llama(width=64, hidden=128, kv=32, depth=1)
        tree["model"]["embed_tokens"]["embedding"] = array(256, 64)
        tree["lm_head"]["kernel"] = array(64, 256)
        random = np.random.default_rng(0)
        params = jax.tree.map(lambda leaf: 0.1 * random.standard_normal(leaf.shape, dtype=np.float32), tree)
        tokens = random.integers(0, 256, (8, 16))
        batch = jax.sharding.NamedSharding(mesh, P("fsdp" if "fsdp" in sizes else None))
        found = sr.suggest(params, mesh)
        assert_proven(found)

        def layer(x, p):
            norm = x * p["input_layernorm"]["scale"]
            q, k, v = (norm @ p["self_attn"][f"{of}_proj"]["kernel"] for of in "qkv")
            k, v = (jnp.repeat(one, 2, axis=-1) for one in (k, v))
            x += jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ p["self_attn"]["o_proj"]["kernel"]
            norm = x * p["post_attention_layernorm"]["scale"]
            gate, up = (norm @ p["mlp"][f"{of}_proj"]["kernel"] for of in ("gate", "up"))
            return x + (jax.nn.silu(gate) * up) @ p["mlp"]["down_proj"]["kernel"]

        def loss(params):
            x = params["model"]["embed_tokens"]["embedding"][tokens]
            x = jax.lax.with_sharding_constraint(x, batch)
            for p in params["model"]["layers"].values():
                x = layer(x, p)
            logits = (x * params["model"]["norm"]["scale"]) @ params["lm_head"]["kernel"]
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

        def step(params):
            value, grads = jax.value_and_grad(loss)(params)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        placed = sr.shard(params, found.rules, mesh)
        shardings = found.plan.shardings()
        jitted = jax.jit(step, out_shardings=(None, shardings), donate_argnums=0)
        proof = sr.verify(jitted.lower(placed).compile(), (found.plan,), (None, found.plan))
        assert not proof.at_least("warning"), proof


def test_jax_is_not_imported_for_it():
    code = """
import sys, shardrules as sr
class Leaf: shape, dtype = (64, 256), "float32"
found = sr.suggest({"up": {"kernel": Leaf()}}, {"fsdp": 8})
found.to_toml(), found.to_python(), str(found), found.plan.check(**found.declared)
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestLogicalNames:
    """Libraries ship tables of names; what `suggest` writes is for paths, whatever names there are."""

    NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    TREE = {"up": models.array(64, 256), "down": models.array(256, 64)}

    @pytest.mark.parametrize(
        ("model", "more"),
        [(TREE, {"dialect": sr.dialects.LINEN}), (sr.plan(TREE, sr.LogicalRules([]), MESH, names=NAMES), {})],
    )
    def test_a_table_is_refused_with_where_to_get_one(self, model, more):
        with pytest.raises(TypeError, match=r"libraries ship a table, such as MaxText's base\.yml"):
            sr.suggest(model, MESH, **more)

    def test_boxes_get_rules_of_paths(self):
        spmd = pytest.importorskip("flax.linen.spmd")
        boxes = {path: spmd.LogicallyPartitioned(self.TREE[path], self.NAMES[path]) for path in self.TREE}
        found = sr.suggest(boxes, MESH).rules
        assert found.dialect == sr.dialects.NNX
        assert list(found) == list(sr.suggest(self.TREE, MESH).rules)
