# SPDX-License-Identifier: Apache-2.0
"""Everything that the documentation shows is run."""

import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kvpack
import pytest
from rig import die_with_parent

PACKAGE = Path(__file__).parents[1]
TOP = Path(os.environ.get("KVP_TOP", PACKAGE.parents[1]))
EXAMPLES = sorted(PACKAGE.glob("examples/*.py"))
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable


@pytest.mark.skipif(shutil.which("mypy") is None, reason="no mypy")
def test_types():
    """The package is typed strictly, and so are the examples."""
    command = ["mypy", f"--cache-dir={os.environ['KVP_BIN']}/mypy", "kvpack", *map(str, EXAMPLES)]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def blocks(path, *languages):
    found = re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), re.M | re.S)
    return [(language, text) for language, text in found if language in languages]


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(kvpack.__path__)])
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(f"kvpack.{name}")).failed == 0


def test_readme(nodes, capsys):
    code = "\n".join(text for _, text in blocks(PACKAGE / "README.md", "python"))
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    said = capsys.readouterr().out
    for text in ("p0 127.0.0.1:", "0.1.0", "0 30", "b'first token'", "WAITING", "pages"):
        assert text in said, f"{text!r} is not in {said!r}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as `make python` does, without a network."""
    tmp = tmp_path_factory.mktemp("wheel")
    shutil.copytree(PACKAGE, tmp / "source", ignore=shutil.ignore_patterns("tests", "*.egg-info"))
    build = ["pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp]
    subprocess.run([PYTHON, "-m", *build, tmp / "source"], check=True)
    (path,) = tmp.glob("*.whl")
    return path


def test_wheel_has_what_it_needs(wheel):
    listed = subprocess.run(
        [PYTHON, "-m", "zipfile", "-l", wheel], check=True, capture_output=True, text=True
    ).stdout
    modules = {path.name for path in (PACKAGE / "kvpack").iterdir() if path.is_file()}
    assert modules <= set(re.findall(r"kvpack/(\S+)", listed))
    assert "py.typed" in modules and "tests" not in listed


def test_quickstart(wheel, tmp_path):
    """Its shell blocks in one shell, its script as move.py; only `console` is not run."""
    page = TOP / "docs/quickstart.md"
    ((_, script),) = blocks(page, "python")
    code = [line for line in script.splitlines() if line.strip() and line[0] != "#"]
    assert len(code) <= 30
    (tmp_path / "move.py").write_text(script)
    shutil.copy(wheel, tmp_path)
    shell = ["set -e", "trap 'kill $(jobs -p)' EXIT"]
    for _, text in blocks(page, "sh"):
        shell.append(text)
        if "kvpackd" in text:
            shell.append("until [ -e kvpack.sock ]; do sleep 0.02; done")
    environment = dict(
        os.environ,
        PATH=f"{os.environ['KVP_BIN']}:/usr/bin:/bin",
        PIP_NO_INDEX="1",
        PIP_NO_DEPENDENCIES="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        HOME=str(tmp_path),
    )
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", "-c", "\n".join(shell)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=die_with_parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "moved 40 tokens" in done.stdout
