"""`suggest`: what experts do beyond the fewest bytes, for models that no manifest has, in every dialect, for any tree."""

from __future__ import annotations

import gzip
import json
import random
import re
import tomllib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.specs import entry_axes
from tests.support import models
from tests.support.folders import DATA
from tests.support.models import array
from tests.support.plans import cuts
from tests.support.slow import slow

MESH = {"fsdp": 8, "tp": 4}


def specs(suggestion):
    return {pattern: tuple(spec) for pattern, spec in suggestion.rules}


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


def square(*names):
    """Layers of square kernels, which no shape tells."""
    return {f"b{i}": {name: models.kernel(64, 64) for name in names} for i in range(9)}


def lora(rows, columns, rank=16):
    """A kernel with its factors beside it."""
    return {**models.kernel(rows, columns), "lora_a": array(rows, rank), "lora_b": array(rank, columns)}


BARE = {f"b{i}": {"x": models.kernel(64, 256), "y": models.kernel(256, 64), "z": array(64)} for i in range(8)}
LORA = models.llama(lora=16)
UNLIKE = {"layers": {str(i): {"up": models.kernel(64, 250 if i == 3 else 256), "norm": array(64)} for i in range(12)}}
# what, model, mesh, arguments, some of its rules
RULES = [
    ("as an expert writes them", models.llama(), MESH, {}, {
        "embed_tokens/embedding": ("tp", "fsdp"), "self_attn/(q|k|v)_proj/kernel": ("fsdp", "tp"),
        "self_attn/o_proj/kernel": ("tp", "fsdp"), "mlp/(gate|up)_proj/kernel": ("fsdp", "tp"),
        "mlp/down_proj/kernel": ("tp", "fsdp"), "lm_head/kernel": ("fsdp", "tp"), "scale": ()}),
    ("names do not matter where shapes tell", {**BARE, "first": models.kernel(1000, 64), "last": {"z": array(64)}}, MESH, {},
     {"x/kernel": ("fsdp", "tp"), "y/kernel": ("tp", "fsdp")}),
    ("mamba", models.mamba(), MESH, {},
     {"mixer/(in|dt)_proj/weight": ("tp", "fsdp"), "mixer/(x|out)_proj/weight": ("fsdp", "tp")}),
    ("gemma", models.gemma(), MESH, {}, {
        "attn/q_einsum/w": ("tp", "fsdp"), "attn/kv_einsum/w": (None, "tp", "fsdp"), "mlp/linear/w": ("tp", "fsdp"),
        "attn/attn_vec_einsum/w": ("tp", None, "fsdp"), "mlp/gating_einsum/w": (None, "fsdp", "tp")}),
    ("heads of a dimension of its own are whole", models.gemma(), {"tp": 16}, {}, {"attn/kv_einsum/w": ()}),
    ("heads that divide are cut", models.gemma(), {"tp": 8}, {}, {"attn/kv_einsum/w": (None, "tp")}),
    ("a diffusion transformer", models.diffusion_transformer(), MESH, {}, {
        "attn/qkv/weight": ("tp", "fsdp"), "attn/proj/weight": ("fsdp", "tp"), "mlp/fc2/weight": ("fsdp", "tp")}),
    ("siglip", models.siglip(), MESH, {}, {
        "MlpBlock_0/Dense_0/kernel": (None, "fsdp", "tp"),
        "MultiHeadDotProductAttention_0/(query|key|value)/kernel": (None, "fsdp", "tp"),
        "MultiHeadDotProductAttention_0/out/kernel": (None, "tp", None, "fsdp")}),
    ("graphs", models.graph_network(), {"fsdp": 8}, {}, {"mlp/3/weight": (None, "fsdp")}),
    ("experts by their axis, all else as by fsdp", models.gpt_oss(), {"fsdp": 4, "ep": 8, "tp": 2}, {}, {
        "/mlp/experts/(gate_up|down)_proj$": ("ep", "fsdp", "tp"), "self_attn/(q|k|v)_proj/weight": ("tp", ("fsdp", "ep"))}),
    ("LoRA and the optimizer's state", {"params": LORA, "opt_state": [{"mu": LORA, "nu": LORA}]}, MESH, {},
     {"self_attn/(q|k|v)_proj/kernel": ("fsdp", "tp")}),
    ("the rank of LoRA is whole", {"mlp": {"up": lora(1024, 4096), "down": lora(4096, 1024)}, "norm": array(1024)}, {"fsdp": 8}, {},
     {"up/(kernel|lora_a)": ("fsdp",), "down/kernel": (None, "fsdp"), "down/lora_a": ("fsdp",), "lora_b": (None, "fsdp")}),
    ("axes by their names", models.llama(), {"data": 2, "model": 4, "seq": 2}, {}, {"mlp/down_proj/kernel": ("model",)}),
    ("data alone", models.llama(), {"data": 8}, {}, {"mlp/down_proj/kernel": (None, "data")}),
    ("a strange axis", models.llama(), {"x": 8}, {}, {"mlp/down_proj/kernel": (None, "x")}),
    ("heads of a size that is given", models.llama(), {"fsdp": 4, "tp": 16}, {"head_dim": 128},
     {"self_attn/(k|v)_proj/kernel": ("fsdp",), "self_attn/q_proj/kernel": ("fsdp", "tp")}),
    ("heads of the size of their norm", models.llama(head_norm=128), {"fsdp": 4, "tp": 16}, {},
     {"self_attn/(k|v)_proj/kernel": ("fsdp",), "self_attn/q_proj/kernel": ("fsdp", "tp")}),
    ("other numbers, other specs", UNLIKE, {"tp": 4}, {},
     {"layers/3/up/kernel": ("tp",), r"layers/\d+/up/kernel": (None, "tp")}),
    ("numbers behind other numbers", {"layers": [{"args": [1.0, array(4, n, m)]} for n, m in ((64, 16), (32, 64))]},
     {"fsdp": 4, "tp": 2}, {}, {"layers/1/args/1": (None, "fsdp", "tp"), r"layers/\d+/args/\d+": (None, ("fsdp", "tp"))}),
    ("numbers before other numbers", {"stages": [{"up": [models.kernel(64, size)] * 2} for size in (256, 250, 256)]},
     {"tp": 4}, {}, {"stages/1/up/(0|1)/kernel": ("tp",), r"stages/\d+/up/\d+/kernel": (None, "tp")}),
    ("numbers in names are names", square("w1", "w2"), {"tp": 4}, {}, {"w1/kernel": (None, "tp"), "w2/kernel": ("tp",)}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "mesh", "more", "some"), [pytest.param(*row[1:], id=row[0]) for row in RULES])
def test_rules_are_as_an_expert_writes_them(model, mesh, more, some):
    found = sr.suggest(model, mesh, **more)
    assert_proven(found)
    assert {pattern: specs(found)[pattern] for pattern in some} == some
    numbered = [pattern for pattern, _ in found.rules if re.search(r"/\d+/", str(pattern))]
    assert numbered == [pattern for pattern, _ in found.rules][: len(numbered)]


@pytest.mark.parametrize("mesh", [MESH, {"fsdp": 64}, {"tp": 8}, {"dp": 2, "fsdp": 2, "tp": 8}])
@pytest.mark.parametrize(
    "model",
    [
        models.mamba, models.gemma, models.diffusion_transformer, models.siglip, models.gpt_oss,
        models.resnet, models.graph_network,
    ],
)  # fmt: skip
def test_models_that_no_manifest_has(model, mesh):
    found = sr.suggest(model(), mesh)
    assert_proven(found)
    assert len(found.rules) <= 30


def random_names(count):
    names = random.Random(0)
    return {f"{names.getrandbits(64):x}": array(64, 64) for _ in range(count)}


@pytest.mark.parametrize(
    ("tree", "arguments", "expected"),
    [
        ({"a/w": array(64, 256), "a": {"w": array(256, 64)}}, {}, "two leaves have the path 'a/w'.*rename"),
        (random_names(5000), {}, r"paths that differ not only in numbers.*fsdp\(axis\)"),
        (random_names(200), {"dialect": sr.dialects.KERAS}, r"200 paths, such as .* too many names for rules"),
        (models.llama(), {"devices": 8}, "mesh or devices, not both"),
        (models.llama(), {"axes": ("fsdp",)}, "give devices as well"),
    ],
)
def test_what_is_refused(tree, arguments, expected):
    with pytest.raises(ValueError, match=expected):
        sr.suggest(tree, MESH, **arguments)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        array(64, 64),
        array(),
        {"bias": array(64), "count": array()},
        {f"l{p}": models.kernel(p, q) for p, q in [(7, 13), (17, 19), (101, 103)]},
    ],
)
def test_little_trees(tree):
    found = sr.suggest(tree, MESH)
    assert not found.plan.check(**found.declared).at_least("warning")
    assert found.plan.coverage.unmatched == 0


DIALECTS = [
    sr.dialects.EFORMER, sr.dialects.EASYLM, sr.dialects.KEYSTR, sr.dialects.KERAS, sr.dialects.BIG_VISION, sr.dialects.SPECTRAX, sr.dialects.NNX,
]  # fmt: skip
OF_DIALECTS = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)


def cut(spec):
    """The dimensions that are cut, and the axes."""
    return {dim: entry for dim, entry in enumerate(spec) if entry is not None}


@OF_DIALECTS
def test_every_dialect_gives_each_leaf_the_same_spec(dialect):
    found = sr.suggest(LORA, MESH, dialect=dialect)
    assert found.rules.dialect == dialect
    # By their own path through a real tree, not by paths alone.
    plans = [sr.plan(LORA, rules, MESH) for rules in (found.rules, sr.suggest(LORA, MESH).rules)]
    first, second = ([cut(plan.kinds[kind].spec) for kind in plan.kind_of] for plan in plans)
    assert first == second
    assert (found.plan.coverage.dead, found.plan.coverage.unmatched) == ((), 0)


@OF_DIALECTS
def test_files_are_read_as_the_same_rules(dialect, tmp_path):
    model = models.llama(head_norm=128)
    found = sr.suggest(model, {"dp": 2, **MESH}, dialect=dialect)
    (tmp_path / "rules.toml").write_text(found.to_toml(), encoding="utf-8")
    read = sr.read_rules(tmp_path / "rules.toml")
    assert (read.rules, read.declared) == (found.rules, found.declared)
    plan = sr.plan(model, read.rules, {"dp": 2, **MESH})
    assert not plan.check(**read.declared).at_least("warning")
    made = {}
    exec(found.to_python(), made)
    assert made["rules"] == [(pattern, P(*spec)) for pattern, spec in found.rules]


def test_patterns_are_as_the_dialect_writes_them():
    keystr, keras = (sr.suggest(models.llama(), MESH, dialect=one).rules[2][0] for one in DIALECTS[2:4])
    assert (keystr, keras) == (r"self_attn'\]\['o_proj'\]\['kernel'\]", ".*self_attn/o_proj/kernel")


@pytest.mark.parametrize(
    ("model", "axes", "mesh"),
    [
        (models.llama(), ("fsdp", "tp"), ["fsdp", "tp"]),
        (models.gpt_oss(), None, ["fsdp", "tp", "ep"]),
        (models.llama(), ("x",), ["x"]),
    ],
)
def test_the_mesh_is_chosen_by_a_sweep(model, axes, mesh):
    found = sr.suggest(model, devices=16, axes=axes)
    assert (list(found.mesh), found.plan.devices) == (mesh, 16)
    assert_proven(found)


def test_a_plan_is_a_model():
    plan = sr.plan(models.llama(), [(".*", P())], MESH)
    assert sr.suggest(plan).rules == sr.suggest(models.llama(), MESH).rules
    assert sr.suggest(plan, {"fsdp": 8}).rules == sr.suggest(models.llama(), {"fsdp": 8}).rules


def test_reasons_say_which_dimension_is_what():
    reason = sr.suggest(models.llama(), MESH).reasons[1]
    assert reason.leaves == 12
    assert [tuple(one) for one in reason.dims] == [(0, 4096, "residual", ("fsdp",)), (1, 4096, "hidden", ("tp",))]
    assert "residual 4096 by fsdp, hidden 4096 by tp" in str(reason)
    found = sr.suggest(square("x"), MESH)
    (row,) = found.reasons
    assert (row.is_understood, row.paths) == (False, ("b{0..8}/x/kernel",))
    assert "not understood" in str(found)
    assert "not understood: b{0..8}/x/kernel" in found.to_toml()


HOSTILE = {
    "a.*b": {"k+[(": array(64, 256)}, "a|b": {"k+[(": array(256, 64)}, "^$": array(64, 64), "": array(64),
    "é键": {"w\\d": array(64, 64)}, "x\ny": array(64, 64), "it's": {'"q"': array(64, 64)}, "##[cmd]\x1b": array(128, 64),
    "w": {"": array(8), "a": array(64, 256)}, "'\"\\\n": array(64, 256), "é\u202e": array(256, 64),
}  # fmt: skip


@pytest.mark.parametrize("mesh", [MESH, {'a"b': 2, "##[x]\x1b'": 2}])
def test_hostile_names_stay_text_in_files(mesh):
    found = sr.suggest(HOSTILE, mesh)
    assert_proven(found)
    for text in (found.to_toml(), found.to_python(), str(found)):
        assert "##[" not in text
        assert all(line.isprintable() for line in text.splitlines())
    read, made = tomllib.loads(found.to_toml())["rules"], {}
    exec(found.to_python(), made)
    patterns = [pattern for pattern, _ in found.rules]
    assert [one["pattern"] for one in read] == [pattern for pattern, _ in made["rules"]] == patterns
    assert made["rules"] == [(pattern, P(*spec)) for pattern, spec in found.rules]


def test_a_dialect_of_ones_own_is_not_in_files():
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


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tp": 2}, slow({"fsdp": 8}), slow({"tp": 8})])
def test_a_transformer_is_as_planned_when_it_is_compiled(sizes):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(tuple(sizes.values())), tuple(sizes))
    tree = models.llama(width=64, hidden=128, kv=32, depth=1)
    tree["model"]["embed_tokens"]["embedding"], tree["lm_head"]["kernel"] = array(256, 64), array(64, 256)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 16))
    found = sr.suggest(tree, mesh)
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
        x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P("fsdp" if "fsdp" in sizes else None)))
        for p in params["model"]["layers"].values():
            x = layer(x, p)
        logits = (x * params["model"]["norm"]["scale"]) @ params["lm_head"]["kernel"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    def step(params):
        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    jitted = jax.jit(step, out_shardings=(None, found.plan.shardings()), donate_argnums=0)
    proof = sr.verify(jitted.lower(found.plan.abstract()).compile(), (found.plan,), (None, found.plan))
    assert not proof.at_least("warning"), proof


GPT_OSS = DATA / "maxtext-dumps" / "gpt-oss-20b_tpu7x-16_default.json.gz"


def by_name(found, path):
    return cuts(found.plan.explain(path).kind.spec)


def gpt_oss():
    leaves = json.loads(gzip.decompress(GPT_OSS.read_bytes()))["leaves"]
    return {
        re.sub(r"[\[\]']", "", path): array(*leaf["shape"])
        for path, leaf in leaves.items()
        if path.startswith(".params")
    }


def multi_head(heads, width=1152, size=256):
    """An attention of flax's MultiHeadAttention, in layers with an MLP."""
    attention = {name: models.kernel(width, heads, size) for name in ("query", "key", "value")}
    attention["out"] = models.kernel(heads, size, width)
    layer = {
        "MultiHeadAttention_0": attention,
        "mlp": {"up": models.kernel(width, 6912), "down": models.kernel(6912, width)},
        "norm": {"scale": array(width)},
    }
    return {"embed": {"embedding": array(32000, width)}, "layers": models.layers(4, layer)}


def test_what_cannot_be_cut_is_not_declared_and_check_warns_of_it():
    found = sr.suggest(models.llama(), {"fsdp": 6, "tp": 3})
    assert found.declared["replicated"] == ()
    assert {one.kind for one in found.warnings} == {"replicated"}
    named = {path for one in found.warnings for path in one.paths}
    assert "model/layers/{0..3}/mlp/up_proj/kernel" in named
    assert found.plan.check(**found.declared).at_least("warning")
    # Norms and kernels that nothing cuts have rules of their own.
    assert all(len({dim.role == "vector" for dim in reason.dims}) == 1 for reason in found.reasons)
    assert specs(found)["scale"] == ()


@pytest.mark.parametrize("heads", [2, 3, 4, 8])
def test_few_heads_are_heads(heads):
    found = sr.suggest(multi_head(heads), {"fsdp": 4, "tp": heads})
    assert specs(found)["MultiHeadAttention_0/(query|key|value)/kernel"] == ("fsdp", "tp")
    assert specs(found)["MultiHeadAttention_0/out/kernel"] == ("tp", None, "fsdp")
    (reason,) = [one for one in found.reasons if "out" in str(one.pattern)]
    assert [dim.role for dim in reason.dims] == ["heads", "head", "residual"]


def test_queries_keys_and_values_in_one_kernel_are_not_heads():
    tree = multi_head(12, width=768, size=64)
    fused = {
        "qkv": models.kernel(768, 3, 768),
        "kv_einsum": {"w": array(2, 8, 768, 64)},
        "out": models.kernel(12, 64, 768),
    }
    for layer in tree["layers"].values():
        layer |= {"MultiHeadAttention_0": fused}
        layer["mlp"]["gating_einsum"] = {"w": array(2, 768, 6912)}
    found = sr.suggest(tree, {"fsdp": 4, "tp": 2})
    roles = {str(one.pattern): [dim.role for dim in one.dims] for one in found.reasons}
    assert roles["MultiHeadAttention_0/qkv/kernel"] == ["residual", "fused", "hidden"]
    assert roles["MultiHeadAttention_0/kv_einsum/w"] == ["fused", "heads", "residual", "head"]
    assert roles["mlp/gating_einsum/w"] == ["fused", "residual", "hidden"]


FLAT = models.llama(width=8192, hidden=28672)
APART = multi_head(32, width=4096, size=128)
for layer in APART["layers"].values():
    layer["MultiHeadAttention_0"] |= {"key": models.kernel(4096, 8, 128), "value": models.kernel(4096, 8, 128)}


@pytest.mark.parametrize(
    ("tree", "mesh", "head_dim", "spec"),
    [
        *((APART, {"tp": tp}, None, (None, "tp")) for tp in (2, 4, 8)),
        (APART, {"tp": 16}, None, ()),
        # Nothing tells the size of heads: they are not halved, and nothing is said about them.
        (FLAT, {"fsdp": 4, "tp": 8}, None, ("fsdp", "tp")),
        (FLAT, {"fsdp": 4, "tp": 16}, None, ("fsdp",)),
        (FLAT, {"fsdp": 4, "tp": 16}, 64, ("fsdp", "tp")),
        (FLAT, {"fsdp": 4, "tp": 8}, 256, ("fsdp",)),
        (FLAT, {"fsdp": 4, "tp": 16}, 128, ("fsdp",)),
        (models.llama(kv=4096), {"tp": 64}, None, (None, "tp")),  # as many heads as queries
    ],
)
def test_heads_of_keys_are_cut_where_they_divide_and_whole_elsewhere(tree, mesh, head_dim, spec):
    found = sr.suggest(tree, mesh, head_dim=head_dim)
    kernels = {
        path: by_name(found, path) for path in found.plan.paths if re.search(r"(k_proj|v_proj|key|value)/kernel", path)
    }
    assert {*kernels.values()} == {spec}
    assert not found.warnings


def test_projections_to_a_latent_space_are_whole_over_tensor_axes():
    attention = {
        "q_a_proj": models.kernel(4096, 1536), "q_b_proj": models.kernel(1536, 12288),
        "kv_a_proj_with_mqa": models.kernel(4096, 576), "kv_b_proj": models.kernel(512, 16384),
        "o_proj": models.kernel(8192, 4096), "q_a_layernorm": {"scale": array(1536)},
    }  # fmt: skip
    layer = {
        "self_attn": attention,
        "mlp": {"up_proj": models.kernel(4096, 11008), "down_proj": models.kernel(11008, 4096)},
    }
    tree = {"embed": {"embedding": array(32000, 4096)}, "layers": models.layers(4, layer)}
    found = sr.suggest(tree, {"fsdp": 4, "tp": 8})
    assert specs(found)["self_attn/(q_a_proj|kv_a_proj_with_mqa)/kernel"] == ("fsdp",)
    assert specs(found)["self_attn/(q|kv)_b_proj/kernel"] == ("fsdp", "tp")
    assert not found.warnings
    # Over tp alone they are whole, on purpose.
    whole = sr.suggest(tree, {"tp": 8})
    assert specs(whole)["self_attn/(q_a_proj|kv_a_proj_with_mqa)/kernel"] == ()
    assert not whole.warnings


def test_biases_follow_the_columns_of_their_kernels():
    dense = {"fc1": models.weight(4096, 1024, bias=4096), "fc2": models.weight(1024, 4096, bias=1024)}
    attention = {name: models.weight(1024, 1024, bias=1024) for name in ("query", "key", "value", "out")}
    layer = {"attention": attention, "mlp": dense, "norm": models.weight(1024, bias=1024)}
    tree = {"embed": models.weight(50265, 1024), "layers": models.layers(24, layer)}
    found = sr.suggest(tree, {"fsdp": 2, "tp": 4})
    for name, spec in {"attention/query": ("tp",), "attention/out": (), "mlp/fc1": ("tp",),
                       "mlp/fc2": (), "norm": ()}.items():  # fmt: skip
        assert (by_name(found, f"layers/0/{name}/bias")) == spec
    only_fsdp = sr.suggest(tree, {"fsdp": 8})
    assert (by_name(only_fsdp, "layers/0/mlp/fc1/bias")) == ()


OF_EXPERTS = {"wi_0": ("ep", None, "fsdp"), "wi_1": ("ep", None, "fsdp"), "wo": ("ep", None, None, "fsdp")}
OF_BIASES = {"query/bias": ("tp",), "key/bias": ("tp",), "wi_0_bias": ("ep", None, "tp"), "out/bias": ()}


@pytest.mark.parametrize(
    ("mesh", "ends"),
    [
        ({"fsdp": 16, "ep": 8}, OF_EXPERTS),  # that no name tells
        ({"fsdp": 4, "tp": 4}, {"gate/kernel": ("fsdp",)}),  # routers are whole over tensor axes
        ({"fsdp": 2, "tp": 4, "ep": 2}, OF_BIASES),  # with heads and of experts
    ],
)
def test_experts_routers_and_biases(mesh, ends):
    found = sr.suggest(gpt_oss(), mesh)
    assert {end: {by_name(found, path) for path in found.plan.paths if path.endswith(end)} for end in ends} == {
        end: {spec} for end, spec in ends.items()}  # fmt: skip
    assert not found.warnings


def test_scales_follow_their_blocks():
    experts = {
        "gate_up_proj_blocks": array(32, 5760, 90, 16), "gate_up_proj_scales": array(32, 5760, 90),
        "down_proj_blocks": array(32, 2880, 90, 16), "down_proj_scales": array(32, 2880, 90),
    }  # fmt: skip
    layer = {"mlp": {"experts": experts, "router": models.weight(32, 2880)}, "norm": models.weight(2880)}
    tree = {"embed": models.weight(201088, 2880), "layers": models.layers(4, layer)}
    for mesh in ({"fsdp": 4, "tp": 4}, {"fsdp": 2, "ep": 8}, {"tp": 8}):
        found = sr.suggest(tree, mesh)
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = ((by_name(found, f"layers/0/mlp/experts/{name}_{of}")) for of in ("blocks", "scales"))
            for size, of_blocks, of_scales in zip((32, 5760, 90), blocks, scales, strict=False):
                assert {*entry_axes(of_blocks)} <= {*entry_axes(of_scales)}, (mesh, size)


def test_a_rule_says_one_thing_of_its_dimensions():
    # By fsdp alone, out and query have one spec: once it is heads, once the residual stream.
    tree = multi_head(6144, width=6144, size=2)
    for layer in tree["layers"].values():
        layer["MultiHeadAttention_0"] |= {"key": models.kernel(6144, 8, 128), "value": models.kernel(6144, 8, 128)}
    found = sr.suggest(tree, {"fsdp": 8, "tp": 4})
    for reason in found.reasons:
        rows = found.plan.rule == reason.rule
        shapes = {found.plan.kinds[kind].shape for kind in found.plan.kind_of[rows]}
        cut = {tuple((dim.role, dim.axes) for dim in reason.dims if dim.axes)}
        assert len(cut) == 1
        assert len({len(shape) for shape in shapes}) == 1
    assert not any("|out" in str(one.pattern) or "out|" in str(one.pattern) for one in found.reasons)


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
