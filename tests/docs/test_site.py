"""The documentation as a site: it is built without a warning, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import ROOT

LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")


def test_site_is_built_without_a_warning_and_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not (done.stdout + done.stderr).strip(), done.stdout + done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix(): path for path in (tmp_path / "site").rglob("*.html")}
    for wanted in ("index.html", "index.zh-CN.html", "tutorial.html", "how-to/slow.html", "concepts/planner.html"):
        assert wanted in pages
    assert "log.html" not in pages and "zh/concepts/sharding.html" in pages
    assert (tmp_path / "site" / "search" / "search_index.js").is_file()  # search without a server
    assert (tmp_path / "site" / "source" / "examples" / "ports" / "fsdp2_after.py").is_file()
    front = pages["index.html"].read_text()
    assert (
        'href="tutorial.html"' in front
        and 'src="pictures/offload-light.svg"' in front
        and "source/benchmarks/results/one-gpu.html" in front
    )
    loaded = {found for path in pages.values() for found in LOADED.findall(path.read_text())}
    assert not loaded
