"""`load` and `read_model` from stores: ranges, and a store that fails, cuts or refuses."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import units
from tests.checkpoint.test_layouts import check
from tests.checkpoint.test_load import mesh_of

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")


class Faulty(memory.MemoryFileSystem):
    """A store in memory that does with each question of ranges, and of a state, what a test says."""

    protocol = "faulty"
    cachable = False
    ranges: list
    fault = staticmethod(lambda number: None)
    refuses = False
    version = 1

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def cat_ranges(self, paths, starts, ends, **how):
        parts = super().cat_ranges(paths, starts, ends, **how)
        fault = Faulty.fault(len(Faulty.ranges))
        Faulty.ranges.append(list(zip(starts, ends, strict=True)))
        if fault == "fails":
            return [OSError("503, slow down") for _ in parts]
        if fault == "adds":
            return [part + bytes(10**6) for part in parts]
        return [part[: len(part) // 2] for part in parts] if fault == "cuts" else parts

    def info(self, path, **how):
        if Faulty.refuses:
            raise PermissionError(f"403, expired token, of {Faulty.refuses}")
        return {**super().info(path, **how), "ETag": Faulty.version}


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    for name, value in {"ranges": [], "fault": staticmethod(lambda number: None), "version": 1}.items():
        monkeypatch.setattr(Faulty, name, value, raising=False)
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.normal(size=(64, 48)).astype("float32") for i in range(6)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    sr.save(arrays, tmp_path / "whole", shard_bytes=20_000)
    store = fsspec.filesystem("memory")
    for file in [tmp_path / "model.safetensors", *(tmp_path / "whole").iterdir()]:
        store.pipe_file(f"/{file.relative_to(tmp_path)}", file.read_bytes())
    yield arrays
    store.rm("/whole", recursive=True)
    store.rm("/model.safetensors")


def load(name="model.safetensors", **more):
    return sr.load(f"faulty://{name}", P("tp", "fsdp"), mesh_of((2, 4)), **more)


@pytest.mark.parametrize("name", ["model.safetensors", "whole", "whole/model.safetensors.index.json"])
def test_a_file_an_index_and_a_directory(arrays, name):
    check(load(name), arrays)
    if name == "model.safetensors":  # near ranges are one: the header, and all arrays
        assert [len(ranges) for ranges in Faulty.ranges] == [1, 1]
    stacked = load(name, renames=[sr.Rename("w{i}", "w", "a b -> i b a")])
    check(stacked, {"w": np.stack([array.T for array in arrays.values()])})


def test_what_is_between_near_ranges_is_read_along(arrays):
    data = safetensors.numpy.save({name: np.ones(8, "float32") for name in "abc"})
    fsspec.filesystem("memory").pipe_file("/whole/small.safetensors", data)
    assert list(sr.load("faulty://whole/small.safetensors", P(), mesh_of(), only="a|c")) == ["a", "c"]
    assert [len(ranges) for ranges in Faulty.ranges] == [1, 1]


def test_far_and_long_ranges_are_requests_of_their_own(arrays, monkeypatch):
    for most, only, names, count in ((7000, None, arrays, 12), (30_000, "w[05]", ["w0", "w5"], 2)):
        monkeypatch.setattr(units, "_READ", most)
        Faulty.ranges.clear()
        check(load(only=only), {name: arrays[name] for name in names})
        of_data = [end - begin for ranges in Faulty.ranges[1:] for begin, end in ranges]
        assert len(of_data) >= count
        assert max(of_data) <= 14_000


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fails", "OSError: 503, slow down"),
        ("cuts", r"byte [\d,]+: [\d,]+ of"),
        ("adds", r"byte [\d,]+: 1,[\d,]+ of [\d,]+ bytes came"),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_what_fails_is_an_error(arrays, fault, message, first):
    Faulty.fault = staticmethod(lambda number: fault if number >= first else None)
    with pytest.raises(sr.FileError, match=f"^faulty://model.safetensors: .*{message}.*; check the"):
        load()


def test_a_store_that_refuses(arrays, monkeypatch):
    name = "user:sekret@bucket/model@main/m.safetensors"
    monkeypatch.setattr(Faulty, "refuses", f"faulty://{name}?Signature=SECRET")
    with pytest.raises(sr.FileError) as caught:
        load(f"{name}?Signature=SECRET")
    url = "faulty://bucket/model@main/m.safetensors"
    assert str(caught.value) == (
        f"{url}: PermissionError: 403, expired token, of {url}; check the URL, your credentials and the connection"
    )


def test_a_file_that_changes_meanwhile(arrays, monkeypatch):
    def change(number):
        Faulty.version += number == 1

    Faulty.fault = staticmethod(change)
    with pytest.raises(sr.FileError, match="has changed since its header was read"):
        load()


def test_an_absolute_path_keeps_its_slash(arrays, tmp_path):
    check(sr.load(f"local://{tmp_path}/model.safetensors", P(), mesh_of()), arrays)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("faulty://none.safetensors", "^faulty://none.safetensors: FileNotFoundError: "),
        ("nowhere://user:sekret@bucket/m.safetensors?Sig=SECRET", "^nowhere://bucket/m.safetensors: .*not known"),
    ],
)
def test_a_url_of_nothing(arrays, url, message):
    with pytest.raises(sr.FileError, match=message) as caught:
        sr.load(url, P(), mesh_of())
    assert "sekret" not in str(caught.value).lower()
    assert "SECRET" not in str(caught.value)


def test_s3(arrays, monkeypatch, tmp_path):
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    fsspec.filesystem("s3").clear_instance_cache()
    files = fsspec.filesystem("s3")
    files.mkdir("bucket-of-shardrules")
    files.put(str(tmp_path / "whole"), "bucket-of-shardrules/model", recursive=True)
    check(sr.load("s3://bucket-of-shardrules/model", P("tp"), mesh_of()), arrays)
    with pytest.raises(sr.FileError, match="FileNotFoundError"):
        sr.read_model("s3://bucket-of-shardrules/none.safetensors")
    server.stop()
