"""Sockets between ranks: a message is a line of JSON, and many ranks are asked at the same time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

SHARED_VARIABLE = "ZEROSTD_SHARED_MEMORY"
MOST_BYTES = 1 << 16  # in one message
MOST_ASKED = 32  # ranks, at the same time
T = TypeVar("T")


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the object of one line; None if the other side has closed, or sent something else."""
    data = b""
    while not data.endswith(b"\n") and len(data) < MOST_BYTES:
        block = connection.recv(MOST_BYTES)
        if not block:
            return None
        data += block
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def listen(host: str) -> socket.socket:
    """Return a socket that other ranks can reach: on the interface that leads to the store."""
    family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address = probe.getsockname()[0]
    return socket.create_server((address, 0), family=family, backlog=128)


def store_host(store: Any) -> str:
    """Return the name of the machine that keeps the store, or of this machine if no machine does."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or "localhost")


def host_name() -> str:
    """Return a name that is equal only for ranks that can share memory: same kernel, same processes, same network.
    Empty if sharing is turned off or impossible."""
    if os.environ.get(SHARED_VARIABLE) == "0" or not hasattr(os, "memfd_create"):
        return ""
    try:
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
        return "/".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def map_at_once(function: Callable[[int], T], ranks: list[int]) -> list[T]:
    """Return what a function returns for each rank, asked at the same time; one by one where Python is about to end and
    starts no threads."""
    try:
        with ThreadPoolExecutor(max(1, min(MOST_ASKED, len(ranks)))) as threads:
            return list(threads.map(function, ranks))
    except RuntimeError:
        return [function(rank) for rank in ranks]
