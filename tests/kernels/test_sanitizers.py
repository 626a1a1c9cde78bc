"""The native operations under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: `make sanitize`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("c++"), reason="needs Linux and a C++ compiler"),
]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_driver_finds_nothing(sanitizer: str, tmp_path: Path) -> None:
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    built = subprocess.run(["c++", f"-fsanitize={sanitizer}", str(probe), "-o", str(tmp_path / "probe")], check=False)
    if built.returncode or subprocess.run([str(tmp_path / "probe")], check=False).returncode:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    command = ["make", "-s", f"sanitize-{sanitizer}", f"SANITIZED={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
