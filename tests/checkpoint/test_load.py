"""`load`: bit-equal to safe_open and device_put, and no byte read that no device of the process holds."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.dtypes import BITS, SAFETENSORS
from shardrules._base.io import memory_within
from shardrules._checkpoint import load as loading
from shardrules._checkpoint import units
from tests.support.files import header_file
from tests.support.slow import slow

RULES = [
    ("norm", ()),
    (r"(o|down)_proj\.weight", ("tp", "fsdp")),
    (r"(q|k|v|gate|up)_proj\.weight", ("fsdp", "tp")),
    ("embed", ("fsdp", None)),
    ("lm_head", (None, ("fsdp", "tp"))),
]
LAYER = {
    "input_layernorm": (32,), "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (96, 32), "mlp.up_proj": (96, 32), "mlp.down_proj": (32, 96),
}  # fmt: skip
LLAMA = {
    "model.embed_tokens.weight": (64, 32),
    "lm_head.weight": (64, 32),
    "model.norm.weight": (32,),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()},
}


def mesh_of(shape=(4, 2), axes=("fsdp", "tp")):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes)


def random_bits(rng, shape, dtype):
    """An array of any bits, NaNs too."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    if dtype == np.bool_:
        return np.array(rng.choices([False, True], k=int(np.prod(shape)))).reshape(shape)
    return np.frombuffer(rng.randbytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


@pytest.fixture
def counted(monkeypatch):
    """The bytes that are read of the data of files."""
    read, count = [], units._read_at
    # A list is for several threads.
    by_python(monkeypatch, lambda *call: read.append(done := count(*call)) or done)
    return read


def by_python(monkeypatch, read_at):
    """Read with this function, in the place of the system's."""
    monkeypatch.setattr(units, "_native", None)
    monkeypatch.setattr(units, "_read_at", read_at)


def bits(array):
    return np.asarray(array).tobytes()


def by_safe_open(folder):
    safe_open = pytest.importorskip("safetensors").safe_open
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "flax") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def is_whole(loaded, folder, dtype=None):
    for name, array in by_safe_open(folder).items():
        assert bits(loaded[name]) == bits(array.astype(dtype or array.dtype))


@pytest.mark.parametrize("shape", [(4, 2), (1, 8), slow((2, 4)), slow((8, 1)), slow((1, 1))])
def test_as_safe_open_and_device_put(checkpoint, counted, shape):
    mesh = mesh_of(shape)
    loaded = sr.load(checkpoint, RULES, mesh)
    shardings = sr.named_shardings(sr.read_model(checkpoint), RULES, mesh)
    expected = {
        # From the host: an old JAX would cut it by a program, which changes the bits of NaNs.
        name: jax.device_put(np.asarray(array), shardings[name])
        for name, array in by_safe_open(checkpoint).items()
    }
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        assert array.sharding == expected[name].sharding
        for one, other in zip(array.addressable_shards, expected[name].addressable_shards, strict=True):
            assert one.device == other.device
            assert bits(one.data) == bits(other.data)
    # Each byte once, though several devices hold the norms.
    assert sum(counted) == sum(array.nbytes for array in loaded.values())


def test_each_dtype(rng, tmp_path):
    names = {n for n in SAFETENSORS.values() if BITS[n] >= 8} - {"complex64", "float64"}
    arrays = {name: random_bits(rng, (8, 4), name) for name in names}
    arrays["float64"] = np.linspace(-1, 1, 32).reshape(8, 4)
    arrays |= {name: np.arange(32, dtype=name).reshape(8, 4) for name in ("int64", "uint64")}
    safetensors.numpy.save_file(arrays | {"scalar": np.array(3, "float32"), "empty": np.ones((0, 4), "float32")},
         tmp_path / "m.safetensors")  # fmt: skip
    loaded = sr.load(tmp_path / "m.safetensors", [("scalar|empty", ()), ("", "tp")], mesh_of((8,), ("tp",)))
    assert loaded["scalar"] == 3
    assert loaded["empty"].shape == (0, 4)
    for name, array in arrays.items():
        expected = jax.device_put(array)
        assert loaded[name].dtype == expected.dtype
        assert bits(loaded[name]) == bits(expected)


def test_packed_dtypes_are_refused_and_a_bool_is_true_or_false(write):
    header = {"x": {"dtype": "F4", "shape": [4, 2], "data_offsets": [0, 4]}}
    with pytest.raises(sr.FileError, match="x: float4_e2m1fn is packed"):
        sr.load(write("f4.safetensors", header_file(header, bytes(4))), P(), mesh_of())
    header["x"] |= {"dtype": "BOOL", "shape": [4]}
    path = write("bool.safetensors", header_file(header, bytes([0, 1, 2, 255])))
    assert bits(sr.load(path, P(), mesh_of())["x"]) == bytes([0, 1, 1, 1])


def test_a_tree_has_its_structure_and_dtypes(checkpoint):
    tree = {"model": {"embed_tokens": {"weight": jax.ShapeDtypeStruct((64, 32), "float32")}},
            "lm_head": {"weight": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}}  # fmt: skip
    rest = [sr.Rename(f"model.{name}.weight", None) for name in ("norm", "layers.{rest*}")]
    loaded = sr.load(checkpoint, P("fsdp"), mesh_of(), tree=tree, renames=rest)
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    embed = loaded["model"]["embed_tokens"]["weight"]
    assert embed.dtype == "float32"
    own = by_safe_open(checkpoint)["model.embed_tokens.weight"]
    assert bits(embed) == bits(own.astype("float32"))
    both = sr.load(checkpoint, P("fsdp"), mesh_of(), tree=tree, renames=rest, dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(both)} == {np.dtype("float32")}


def test_a_plan_is_rules_tree_and_mesh(checkpoint):
    plan = sr.plan(sr.read_model(checkpoint), RULES, mesh_of())
    loaded = sr.load(checkpoint, plan)
    assert {name: array.sharding for name, array in loaded.items()} == plan.shardings()
    on_sizes = plan.on_mesh({"fsdp": 4, "tp": 2})
    again = sr.load(checkpoint, on_sizes, mesh_of())
    assert all(again[name].sharding == array.sharding for name, array in loaded.items())
    with pytest.raises(TypeError, match="Mesh of devices; this mesh is"):
        sr.load(checkpoint, on_sizes)


def test_what_only_a_compiler_can_decide_is_not_loaded(checkpoint):
    """The dimension came in whole, without a word."""
    rules = [("", P(P.UNCONSTRAINED))]
    with pytest.raises(ValueError, match=r"cannot be placed as P\(UNCONSTRAINED"):
        sr.load(checkpoint, rules, mesh_of())
    loaded = sr.load(checkpoint, sr.Rules(rules, correction=sr.Correction(unconstrained="drop")), mesh_of())
    assert all(not any(array.sharding.spec) for array in loaded.values())


def test_what_does_not_fit_is_one_error(checkpoint):
    own = sr.read_model(checkpoint)
    del own["lm_head.weight"]
    own["model.norm.weight"] = jax.ShapeDtypeStruct((31,), "bfloat16")
    own["model.embed_tokens.weight"] = jax.ShapeDtypeStruct((64, 32), "int32")
    own["output.weight"] = jax.ShapeDtypeStruct((64, 32), "bfloat16")
    own |= {f"extra.{i}.w": jax.ShapeDtypeStruct((3,), "float32") for i in range(30)}
    with pytest.raises(sr.FileError) as info:
        sr.load(checkpoint, P(), mesh_of(), tree=own)
    text = str(info.value)
    assert "34 problems with the arrays" in text
    tied = "Rename('model.embed_tokens.weight', 'output.weight', shared=True)"
    assert f"[64, 32]; if model.embed_tokens.weight is it, too: {tied}" in text
    assert "extra.{0..29}.w: missing: the tree wants float32[3]" in text
    assert "model.norm.weight: unlike the tree, which wants bfloat16[31]: the array is bfloat16[32]" in text
    assert "embed_tokens.weight: unlike the tree, which wants int32[64, 32]: the array is bfloat16[64, 32]" in text
    assert "lm_head.weight: left over: the tree does not have it; a Rename to None leaves it out" in text


@pytest.mark.parametrize("most", [3000, 20_000])
def test_bytes_in_flight_are_bounded(checkpoint, monkeypatch, most):
    held, peak = [0], [0]
    memory, arrive = units._Unit.memory, units._Filling._arrive

    def begin(unit):
        held[0] += unit.needs
        peak[0] = max(peak[0], held[0])
        return memory(unit)

    def end(filling):
        held[0] -= filling._sent[0][0]
        arrive(filling)

    monkeypatch.setattr(units._Unit, "memory", begin)
    monkeypatch.setattr(units._Filling, "_arrive", end)
    for dtype in (None, "float32") if most > 10_000 else (None,):
        loaded = sr.load(checkpoint, RULES, mesh_of(), dtype=dtype, max_bytes_in_flight=most)
        assert 0 < peak[0] <= most
        assert held[0] == 0
        is_whole(loaded, checkpoint, dtype)


def test_large_parts_go_alone_and_long_ranges_are_cut(checkpoint, monkeypatch):
    is_whole(sr.load(checkpoint, RULES, mesh_of(), max_bytes_in_flight=100), checkpoint)
    monkeypatch.setattr(units, "_READ", 1000)
    is_whole(sr.load(checkpoint, RULES, mesh_of()), checkpoint)


def interrupt(*_):
    raise KeyboardInterrupt


def test_progress(checkpoint):
    seen = []
    loaded = sr.load(checkpoint, RULES, mesh_of(), progress=lambda *both: seen.append(both))
    total = sum(array.nbytes for array in loaded.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    with pytest.raises(KeyboardInterrupt):
        sr.load(checkpoint, RULES, mesh_of(), progress=interrupt)


def test_donating_what_was_loaded_does_not_change_it_elsewhere(checkpoint):
    norm = sr.load(checkpoint, P(), mesh_of())["model.norm.weight"]
    parts = [shard.data for shard in norm.addressable_shards]
    before = bits(parts[1])
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(parts[0]))
    assert bits(parts[1]) == before


class TestUntrusted:
    @pytest.mark.parametrize("way", ["time", "fifo"])
    def test_a_file_that_changes_before_it_is_read(self, checkpoint, monkeypatch, way):
        read, path = loading.fill, checkpoint / "a.safetensors"

        def change(*arguments):
            if way == "time":
                os.utime(path, ns=(0, 12345))
            else:
                path.unlink()
                os.mkfifo(path)
            return read(*arguments)

        monkeypatch.setattr(loading, "fill", change)
        with pytest.raises(sr.FileError, match="the file has changed since|not a regular file"):
            sr.load(checkpoint, RULES, mesh_of())

    @pytest.mark.parametrize("way", ["truncate", "write", "replace"])
    def test_a_file_that_changes_while_it_is_read(self, checkpoint, monkeypatch, way):
        path, read_at, done = checkpoint / "a.safetensors", units._read_at, []

        def change(file, begin, into):
            if not done:
                done.append(file)
                data = path.read_bytes()
                if way == "truncate":
                    os.truncate(path, 2000)
                elif way == "write":
                    path.write_bytes(data[:-1] + b"x")
                else:
                    (checkpoint / "new").write_bytes(data)
                    os.replace(checkpoint / "new", path)
            return read_at(file, begin, into)

        by_python(monkeypatch, change)
        if way == "replace":  # the file that is open stays as it was
            sr.load(checkpoint / "a.safetensors", P(), mesh_of())
            return
        with pytest.raises(sr.FileError, match="a.safetensors: the file has changed since its header"):
            sr.load(checkpoint / "a.safetensors", P(), mesh_of())

    def test_a_disk_that_fails(self, checkpoint, monkeypatch):
        def fail(*_):
            raise OSError(5, "Input/output error")

        by_python(monkeypatch, fail)
        with pytest.raises(sr.FileError, match=r"safetensors: byte [\d,]+: Input/output error; check"):
            sr.load(checkpoint, RULES, mesh_of())

    def test_a_manifest_has_no_data(self, write):
        path = write("m.json", {"params": [["w", [4], "F32"]]})
        with pytest.raises(sr.FileError, match="it lists arrays and does not have their data"):
            sr.load(path, P(), mesh_of())


def test_a_spec_of_none(checkpoint):
    path = checkpoint / "a.safetensors"
    with pytest.raises(ValueError, match="gets None; each array needs"):
        sr.load(path, dict.fromkeys(sr.read_model(path)), mesh_of())


def test_memory_kinds_are_those_of_the_rules(checkpoint):
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip("these devices have no pinned_host memory")
    spec = NamedSharding(mesh_of(), P("fsdp"), memory_kind="pinned_host")
    for most in ("1GB", 5000):
        loaded = sr.load(checkpoint, spec, max_bytes_in_flight=most)
        assert {array.sharding.memory_kind for array in loaded.values()} == {"pinned_host"}


LOST = [
    (1e300, "float64", None), (1e30, "float32", "float16"), (-3.4028235e38, "float32", "bfloat16"),
    (1e30, ml_dtypes.bfloat16, "float16"), (500, "float32", ml_dtypes.float8_e4m3fn), (65000, "float16", ml_dtypes.float8_e5m2),
    (2**40, "int64", None), (2**63 + 5, "uint64", None), (-(2**31) - 1, "int64", None),
]  # fmt: skip


def one_array(folder, values, dtype):
    safetensors.numpy.save_file({"w": np.array(values, dtype)}, folder / "m.safetensors")
    return folder / "m.safetensors"


@pytest.mark.parametrize(("value", "of", "to"), LOST)
@pytest.mark.parametrize("renames", [(), [sr.Rename("w", "w", "(a b) -> b a", {"a": 2})]])
def test_a_value_that_its_dtype_lacks_is_an_error_that_names_the_array(tmp_path, value, of, to, renames):
    path = one_array(tmp_path, [1.0, value, 2, 3], of)
    with pytest.raises(sr.FileError, match=r"^w: a finite value would become infinite, or an integer"):
        sr.load(path, P(), mesh_of(), dtype=to, renames=renames)


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_other_values_are_no_error(tmp_path, to, recwarn):
    values = np.array([np.inf, -np.inf, np.nan, 65504 + 8, 1e-30, 0], "float32")
    loaded = sr.load(one_array(tmp_path, values, "float32"), P(), mesh_of(), dtype=to)["w"]
    expected = values.astype(np.dtype(loaded.dtype))
    assert np.isfinite(expected[3:].astype("float32")).all()
    assert bits(loaded) == bits(expected)
    assert not recwarn.list


@pytest.mark.parametrize("place", [(units._Unit, "memory"), (units.Reader, "read")])
def test_a_memory_that_is_full(checkpoint, monkeypatch, place):
    def fail(*_):
        raise MemoryError("Unable to allocate 64.0 MiB")

    monkeypatch.setattr(*place, fail)
    with pytest.raises(MemoryError, match="Unable to allocate 64.0 MiB.*max_bytes_in_flight"):
        sr.load(checkpoint, RULES, mesh_of())


@pytest.mark.parametrize("gap", [0, 100, 4096])
def test_the_core_and_python_read_the_same(rng, tmp_path, monkeypatch, gap):
    """csrc/tests/test_files.cpp has faults."""
    native, data = units._native, rng.randbytes(100_000)
    (tmp_path / "data").write_bytes(data)
    monkeypatch.setattr(units, "GAP", gap)
    sizes = np.array([rng.choice([0, 1, 7, 300, 5000]) for _ in range(2000)])
    begins = np.sort([rng.randrange(len(data) - 5000) for _ in sizes])
    ranges = units.Ranges(begins, sizes, np.cumsum(sizes) - sizes)
    expected = b"".join(data[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True))
    for reads in (native, None):
        monkeypatch.setattr(units, "_native", reads)
        memory = np.zeros(len(expected), np.uint8)
        with open(tmp_path / "data", "rb") as file:
            assert units._read_ranges(file, ranges, memory)[1] == 0
            assert memory.tobytes() == expected
            beyond = units.Ranges(*map(np.array, ([2, 99_998], [3, 4], [0, 3])))
            assert units._read_ranges(file, beyond, memory) == (100_000, -1)


@pytest.mark.parametrize("columns", [([0], [8], [1]), ([-1], [1], [0]), ([0], [-1], [0]), ([0, 1], [1, 1], [0]), ([2**63 - 1], [1], [0])])  # fmt: skip
@pytest.mark.skipif(units._native is None, reason="Python reads here")
def test_ranges_outside_of_the_memory(tmp_path, columns):
    (tmp_path / "data").write_bytes(bytes(10))
    with open(tmp_path / "data", "rb") as file, pytest.raises(ValueError, match="range"):
        units._read_ranges(file, units.Ranges(*map(np.array, columns)), np.zeros(8, np.uint8))


def test_a_box_that_two_places_need_is_read_once(tmp_path, rng, counted):
    array = random_bits(rng, (4, 64), "uint16")
    safetensors.numpy.save_file({"w": array}, tmp_path / "m.safetensors")
    loaded = sr.load(tmp_path, P(), mesh_of(), renames=[sr.Rename("w", "w", "a b -> a n b", sizes={"n": 3})])["w"]
    assert np.array_equal(np.asarray(loaded), np.repeat(array[:, None], 3, 1))
    assert sum(counted) == array.nbytes


def test_a_header_of_very_many_names_is_read(checkpoint):
    """For a model that is to be loaded more memory is taken than to look into a file."""
    with memory_within(1000):
        assert sr.load(checkpoint, P(), mesh_of()).keys() == LLAMA.keys()
