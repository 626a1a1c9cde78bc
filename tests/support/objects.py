"""A small object store: a server that keeps objects in memory, and the fsspec file system that speaks to it.

    with ObjectServer() as server:
        zerostd.save(f"{server.url}/step-1", ...)       # objects://127.0.0.1:PORT/bucket/step-1, from any process

An object is there whole or not at all, names are plain texts, and nothing can be renamed: as in S3. Tests can let
uploads wait, fail or be forbidden. Importing this module makes fsspec know `objects://`.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem


class ObjectServer:
    """The server, in threads of this process, and its switches."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.num_failing = 0  # files that get an error, from now on
        self.may_write = True
        self.failing_end = ""  # uploads of objects whose names end so always fail
        self.opened = threading.Event()  # files wait while it is not set; small objects do not
        self.opened.set()
        self.waiting = threading.Event()  # an upload waits
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"objects://127.0.0.1:{self._server.server_port}/bucket"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer_put(self, name: str, content: bytes) -> int:
        if not self.may_write:
            return 403
        if name.endswith(".safetensors") and not self.opened.is_set():
            self.waiting.set()
            self.opened.wait(60)
        if name.endswith(".safetensors") and self.num_failing:
            self.num_failing -= 1
            return 503
        if self.failing_end and name.endswith(self.failing_end):
            return 503
        self.objects[name] = content
        return 200


class _Handler(BaseHTTPRequestHandler):
    store: ObjectServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = unquote(self.path.removeprefix("/"))
        if name.startswith("?prefix="):
            prefix = name.removeprefix("?prefix=")
            return self._answer(200, json.dumps({n: len(b) for n, b in self._all() if n.startswith(prefix)}).encode())
        content = self.store.objects.get(name)
        if content is None:
            return self._answer(404)
        if "Range" in self.headers:
            start, _, stop = self.headers["Range"].removeprefix("bytes=").partition("-")
            content = content[int(start) : int(stop) + 1]
        self._answer(200, content)

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        content = self.rfile.read(length)
        if len(content) == length:  # or the writer has gone
            self._answer(self.store.answer_put(unquote(self.path.removeprefix("/")), content))

    def do_DELETE(self) -> None:
        self.store.objects.pop(unquote(self.path.removeprefix("/")), None)
        self._answer(200)

    def _all(self) -> Iterator[tuple[str, bytes]]:
        yield from list(self.store.objects.items())

    def _answer(self, code: int, content: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class ObjectFileSystem(AbstractFileSystem):
    """Paths are HOST:PORT/NAME."""

    protocol = "objects"
    cachable = False

    def _ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
        host, _, name = self._strip_protocol(path).partition("/")
        connection = http.client.HTTPConnection(host, timeout=60)
        try:
            connection.request(method, "/" + quote(name, safe="/?="), body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(path)
        if answer.status == 403:
            raise PermissionError(path)
        if answer.status != 200:
            raise RuntimeError(f"the store answers {answer.status}")
        return content

    def _sizes(self, path: str) -> dict[str, int]:
        host, _, name = self._strip_protocol(path).partition("/")
        sizes: dict[str, int] = json.loads(self._ask("GET", f"{host}/?prefix={name}"))
        return {f"{host}/{key}": size for key, size in sizes.items()}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        entries: dict[str, dict[str, Any]] = {}
        for name, size in self._sizes(path).items():
            rest = name.removeprefix(f"{path}/")
            if name != path and rest != name:
                below = f"{path}/{rest.partition('/')[0]}"
                kind = "directory" if "/" in rest else "file"
                entries[below] = {"name": below, "size": 0 if "/" in rest else size, "type": kind}
        if not entries:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else sorted(entries)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path).rstrip("/")
        sizes = self._sizes(path)
        if path in sizes:
            return {"name": path, "size": sizes[path], "type": "file"}
        if any(name.startswith(f"{path}/") for name in sizes):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        headers = {} if start is None or end is None else {"Range": f"bytes={start}-{end - 1}"}
        return self._ask("GET", path, headers=headers)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._ask("PUT", path, value)

    def put_file(self, lpath: str, rpath: str, *arguments: Any, **options: Any) -> None:
        self._ask("PUT", rpath, Path(lpath).read_bytes())

    def rm_file(self, path: str) -> None:
        self._ask("DELETE", path)


fsspec.register_implementation("objects", ObjectFileSystem, clobber=True)
