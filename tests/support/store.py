"""A store on the network: an HTTP server of a folder, which fails, cuts, waits or lies as a test says."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shardrules._plan.files import remote


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of the folder, and does with each what `server.fault(number)` says."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, *, with_body):
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data, code, asked = path.read_bytes(), 200, self.headers.get("Range")
        with self.server.lock:
            fault = self.server.fault(len(self.server.ranges)) if asked else None
            if asked:
                self.server.ranges.append(asked)
        size = len(data)
        if asked and fault != "no ranges":
            begin, end = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            data, code = data[begin : end + 1], 206
        if fault == "fails":
            self.send_error(503)
            return
        if fault == "refuses":
            self.send_error(403)
            return
        if fault == "hangs":
            self.server.stopped.wait(30)
        self.send_response(code)
        self.send_header("ETag", f'"{self.server.version}"')
        self.send_header("Accept-Ranges", "bytes")
        if code == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            half = len(data) // 2
            self.wfile.write(data[:half] if fault == "cuts" else data)
            if fault == "cuts":
                self.close_connection = True
                self.wfile.flush()
                self.connection.close()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.lock, server.ranges, server.version = tmp_path, threading.Lock(), [], 1
    server.fault, server.stopped = lambda number: None, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(remote, "_PAUSES", (0.01,) * 4)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
