"""The kernel under the address, undefined-behaviour and thread sanitizers, where the compiler has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from services.engine.torch_engine.kernel.compiler import FLAGS, SOURCE, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
DRIVER = Path(__file__).parent / "driver.c"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("target", ["-march=native", "-march=x86-64-v3", "-march=x86-64"])
def test_clean(tmp_path: Path, sanitizer: str, target: str) -> None:
    cc, program = find_compiler().path, str(tmp_path / "driver")
    checked = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g"]
    flags = [flag if flag != "-O3" else "-O1" for flag in FLAGS]
    command = [cc, *flags, target, *checked, f"-I{SOURCE}", str(DRIVER), "-o", program, "-pthread", "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if built.returncode and "sanitize" in built.stderr + built.stdout:
        pytest.skip("this compiler has no such sanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout) == (0, "equal\n"), ran.stderr
