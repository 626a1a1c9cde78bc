"""Scripts in processes of their own that have torch loaded already.

A fresh interpreter takes seconds to import torch. A server imports it once and forks for each script. The child runs
the script as `__main__` and ends as any interpreter does: `atexit` runs, threads are joined, an exception is printed
and gives exit code 1. LD_PRELOAD must be there before Python starts, so each value of it has a server of its own. A
script that needs other variables of glibc or of the loader needs a fresh interpreter.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

PRELOADED = (  # what tests need sooner or later: what is not here, each process imports for itself
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "scipy.optimize"),
    *("zerostd.api", "zerostd.checkpointing.dcp", "zerostd.monitoring", "pytest", "hypothesis"),
)
MOST_BYTES = 1 << 17  # of a request
PATHS = [str(Path(__file__).resolve().parents[depth]) for depth in (1, 2)]  # of `support`, and of what examples import


def run(code: str, *words: object, timeout: float = 120.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script to its end; return its exit code and what it printed. See `Script` for the options."""
    with Script(code, *words, **options) as script:
        output, errors = script.communicate(timeout)
        return subprocess.CompletedProcess([code, *map(str, words)], script.wait(), output, errors)


def run_file(path: Path | str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a file as `python PATH` does."""
    file = str(Path(options.get("folder", "."), path).resolve())
    code = f"import runpy, sys; sys.argv[0] = {str(path)!r}; sys.path.insert(0, {str(Path(file).parent)!r})"
    return run(f"{code}; runpy.run_path({file!r}, run_name='__main__')", *words, **options)


class Script:
    """A script that runs, with the names of `subprocess.Popen`."""

    def __init__(
        self, code: str, *words: object, env: Mapping[str, str] | None = None, folder: Path | str | None = None
    ) -> None:
        """Start it with these arguments and all variables of `env`, in `folder`."""
        variables = dict(os.environ if env is None else env)
        request = {"code": code, "words": [str(word) for word in words], "variables": variables}
        message = json.dumps(request | {"folder": str(folder or os.getcwd())}).encode()
        assert len(message) < MOST_BYTES, "the script and its environment are too long"
        replies, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        fds = [theirs.detach(), pipes[0][0], pipes[1][1], pipes[2][1]]
        socket.send_fds(_server(variables.get("LD_PRELOAD", "")), [message], fds)
        for fd in fds:
            os.close(fd)
        self.stdin: IO[str] = os.fdopen(pipes[0][1], "w")
        self.stdout: IO[str] = os.fdopen(pipes[1][0])
        self.stderr: IO[str] = os.fdopen(pipes[2][0])
        self.returncode: int | None = None
        self._replies = replies
        self.pid = int(replies.recv(32))

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return what was printed. A script that takes longer is ended."""
        self.stdin.close()
        with ThreadPoolExecutor(2) as threads:
            texts = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                self.wait()
                raise
            return texts[0].result(), texts[1].result()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._replies.settimeout(timeout)
            try:
                self.returncode = int(self._replies.recv(32))
            except TimeoutError:
                raise subprocess.TimeoutExpired("script", timeout or 0.0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.stdin, self.stdout, self.stderr, self._replies):
            stream.close()


@functools.cache
def _server(preload: str) -> socket.socket:
    """Return the way to a server, which ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {**os.environ, "LD_PRELOAD": preload, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), *PATHS])
    command = [sys.executable, __file__, str(theirs.fileno())]
    server = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


# -- the server's side --


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request. Returns in the children only, with their request and their standard streams."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        message, fds, _, _ = socket.recv_fds(control, MOST_BYTES, 4)
        if not message:
            os._exit(0)
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        script = os.fork()
        if not script:
            os.close(fds[0])
            return json.loads(message), fds[1:]
        for fd in fds[1:]:
            os.close(fd)
        os.write(fds[0], str(script).encode())
        _, status = os.waitpid(script, 0)
        os.write(fds[0], str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)


def _become(request: dict[str, Any], fds: list[int]) -> types.CodeType:
    """Make this process one that was started with the request's arguments; return its script."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = list(dict.fromkeys(["", *paths, *sys.path[1:]]))
    sys.argv = ["-c", *request["words"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return compile(request["code"], "<string>", "exec")


if __name__ == "__main__":
    for _name in PRELOADED:
        importlib.import_module(_name)
    gc.freeze()  # no collection in a child looks at the modules, nor copies their pages
    exec(_become(*_serve(socket.socket(fileno=int(sys.argv[1])))), vars(sys.modules["__main__"]))
