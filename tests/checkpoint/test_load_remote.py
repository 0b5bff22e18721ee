"""`load` from stores on the network: ranges, and a server that fails, cuts, waits or lies."""

from __future__ import annotations

from http.client import HTTPConnection
from socket import SHUT_RDWR

import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._plan.files import remote
from tests.checkpoint.test_load import bits, mesh_of
from tests.support import store
from tests.support.store import Handler

pytest.importorskip("aiohttp")
pytest.importorskip("fsspec")
server = store.server


@pytest.fixture
def arrays(server):
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.normal(size=(64, 48)).astype("float32") for i in range(6)}
    safetensors.numpy.save_file(arrays, server.folder / "model.safetensors")
    sr.save(arrays, server.folder / "whole", shard_bytes=20_000)
    return arrays


def load(server, name="model.safetensors", **more):
    return sr.load(f"{server.url}/{name}", P("tp", "fsdp"), mesh_of((2, 4)), **more)


def check(loaded, arrays):
    assert {name: bits(array) for name, array in loaded.items()} == {
        name: bits(array) for name, array in arrays.items()
    }


def test_a_file_and_an_index(server, arrays):
    check(load(server), arrays)
    check(load(server, "whole/model.safetensors.index.json"), arrays)
    assert list(sr.read_model(f"{server.url}/model.safetensors")) == list(arrays)
    renames = [sr.Rename(r"w(?P<i>\d)", "w", "a b -> i b a")]
    stacked = np.stack([array.T for array in arrays.values()])
    spec = P(None, "tp")
    made = sr.load(f"{server.url}/model.safetensors", spec, mesh_of((2, 4)), renames=renames)
    assert bits(made["w"]) == bits(stacked)


def test_near_ranges_are_one_request(server, arrays):
    load(server)
    assert len(server.ranges) == 2  # the header, and all arrays


FAULTS = ["fails", "cuts", "hangs"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", [0, 1])
def test_what_fails_once_is_asked_for_again(server, arrays, monkeypatch, fault, which):
    monkeypatch.setattr(remote, "_PATIENCE", 0.5)
    server.fault = lambda number: fault if number == which else None
    check(load(server), arrays)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_always_fails_is_an_error(server, arrays, monkeypatch, fault):
    monkeypatch.setattr(remote, "_PATIENCE", 0.2)
    server.fault = lambda number: fault if number >= 1 else None
    with pytest.raises(
        sr.FileError, match=r"model.safetensors: byte .*, 5 times; check the connection"
    ):
        load(server)


@pytest.mark.parametrize(
    ("fault", "message"), [("no ranges", "it serves no ranges"), ("refuses", "403")]
)
def test_a_server_that_serves_no_ranges_or_refuses(server, arrays, fault, message):
    server.fault = lambda number: fault
    with pytest.raises(sr.FileError, match=message):
        load(server)


def test_a_file_that_changes_meanwhile(server, arrays):
    def change(number):
        server.version += number == 1

    server.fault = change
    with pytest.raises(sr.FileError, match="has changed since its header was read"):
        load(server)


def test_a_file_that_is_not_there(server):
    with pytest.raises(sr.FileError, match=r"/none.safetensors: there is no such file"):
        load(server, "none.safetensors")


def test_a_protocol_that_is_unknown():
    with pytest.raises(sr.FileError, match=r"pip install 'shardrules\[remote\]'"):
        sr.load("nowhere://bucket/m.safetensors", P(), mesh_of())


def test_a_directory_in_memory(arrays, server):
    """Of a store without asynchronous calls, and with a listing."""
    import fsspec

    store = fsspec.filesystem("memory")
    for file in (server.folder / "whole").iterdir():
        store.pipe_file(f"/model/{file.name}", file.read_bytes())
    check(sr.load("memory://model", P("tp"), mesh_of()), arrays)
    store.rm("/model", recursive=True)


class Proxy(Handler):
    """In front of another server: passes requests on, and does with those for ranges what is said."""

    def answer(self, *, with_body):
        length = int(self.headers.get("Content-Length", 0))
        connection = HTTPConnection(*self.server.behind)
        connection.request(self.command, self.path, self.rfile.read(length), dict(self.headers))
        answer = connection.getresponse()
        data, headers = answer.read(), dict(answer.getheaders())
        fault = None
        if asked := self.headers.get("Range"):
            with self.server.lock:
                fault = self.server.fault(len(self.server.ranges))
                self.server.ranges.append(asked)
        if fault == "hangs":
            self.server.stopped.wait(30)
        codes = {"fails": (503, "SlowDown"), "refuses": (403, "AccessDenied")}
        status, code = codes.get(fault, (answer.status, None))
        if code:
            data = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            headers = {"Content-Type": "application/xml"}
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in {"connection", "transfer-encoding", "content-length", "etag"}:
                self.send_header(name, value)
        if "ETag" in headers:
            self.send_header("ETag", f'{headers["ETag"][:-1]}{self.server.version}"')
        size = headers.get("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault == "cuts" else data)
        if fault == "cuts":
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(SHUT_RDWR)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = lambda self: self.answer(with_body=True)


@pytest.fixture
def s3(server, arrays, monkeypatch):
    """moto behind a proxy, with the arrays in a bucket."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # or each of our attempts is some of theirs
    store = moto.ThreadedMotoServer(port=0, verbose=False)
    store.start()
    server.behind, server.RequestHandlerClass = store.get_host_and_port(), Proxy
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    remote._store.cache_clear()
    fsspec.filesystem("s3").clear_instance_cache()
    files = fsspec.filesystem("s3")
    bucket = f"bucket{server.server_port}"  # moto's are there for all tests
    files.mkdir(bucket)
    files.put(str(server.folder / "whole"), f"{bucket}/model", recursive=True)
    server.url = f"s3://{bucket}"
    server.ranges.clear()
    yield server
    store.stop()
    remote._store.cache_clear()


def test_s3(s3, arrays):
    check(load(s3, "model"), arrays)


@pytest.mark.parametrize("fault", FAULTS)
def test_s3_that_fails_at_times(s3, arrays, monkeypatch, fault):
    monkeypatch.setattr(remote, "_PATIENCE", 0.5)
    s3.fault = lambda number: fault if number % 3 == 1 else None
    check(load(s3, "model"), arrays)


@pytest.mark.parametrize("fault", [*FAULTS, "refuses"])
def test_s3_that_always_fails(s3, monkeypatch, fault):
    monkeypatch.setattr(remote, "_PATIENCE", 0.2)
    s3.fault = lambda number: fault if number >= 3 else None
    message = "check your credentials" if fault == "refuses" else "5 times; check the connection"
    with pytest.raises(sr.FileError, match=message):
        load(s3, "model")


def test_s3_whose_file_changes(s3):
    def change(number):
        s3.version += number == 3

    s3.fault = change
    with pytest.raises(sr.FileError, match="has changed since its header was read"):
        load(s3, "model")
