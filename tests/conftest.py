"""Settings of all tests, and fixtures for those that start real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tasp_lab.cli.process import main
from tests.support.selection import IS_FULL, fifth, not_covering
from tests.support.signals import hear_interrupts

settings.register_profile(
    "tasp-lab",
    deadline=None,
    max_examples=50,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.filter_too_much],  # corruptions of schedules that change nothing are skipped
)
settings.load_profile("tasp-lab")
if "CI" in os.environ:
    # Hypothesis also draws constants of the modules imported so far, and each worker of pytest has imported others.
    setattr(providers, "_get_local_constants", lambda: providers._local_constants)  # noqa: B010

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other over small tensors take whole cores
os.environ.pop("COLUMNS", None)  # workers of pytest have 80, and tables are as wide as it says

ROOT = Path(__file__).parent.parent

# Tests that change a copy of the packages find the machine code of the simulator, and do not compile it again.
os.environ.setdefault("TASP_LAB_CACHE", str(ROOT / "sim" / "array" / "__pycache__"))

os.environ["TASP_LAB_CACHE_SIZE"] = "0"  # no test depends on the schedules of earlier runs

QUICK_NOTEBOOKS = ("01_the_idea.ipynb", "11_your_own_schedule.ipynb")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-all` runs; and no warning of CUDA, NCCL and the like fails what needs a GPU."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))
    if not IS_FULL:
        for function in {getattr(item, "function", None) for item in items}:
            _draw_fewer(function)
        named = {Path(each.partition("::")[0]).name for each in config.args}
        left_out = [item for item in items if _takes_long(item) and item.path.name not in named]
        left_out += not_covering(items)
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


def _takes_long(item: pytest.Item) -> bool:
    """Whether this is a notebook that is not quick, or is marked ``full``."""
    if item.path.suffix == ".ipynb":
        return item.path.name not in QUICK_NOTEBOOKS
    return item.get_closest_marker("full") is not None


def _draw_fewer(function: Any) -> None:
    """A fifth of the examples of a property test: all of them are half of the time of all tests."""
    used = getattr(function, "_hypothesis_internal_use_settings", None)
    if used is not None:
        function._hypothesis_internal_use_settings = settings(used, max_examples=fifth(used.max_examples))


Tell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Runs a command in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code, told = _exit_code(arguments), capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs ``tasp-lab`` as a user would, in an empty folder."""
    return Command(tmp_path)


class Command:
    """The command line: called in this process, which is quick, or as a process of its own.

    Arguments are words, or one text as it is typed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error::DeprecationWarning:tasp_lab",
        }

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """In this process: its exit code, and what it wrote to streams like those of a process."""
        out, err = io.BytesIO(), io.BytesIO()
        stdout = io.TextIOWrapper(out, "utf-8", write_through=True)
        stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)
        with (
            contextlib.chdir(self.folder), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr)
        ):  # fmt: skip
            code = _exit_code(arguments)
        return subprocess.CompletedProcess(arguments, code, out.getvalue().decode(), err.getvalue().decode())

    def json(self, *arguments: str) -> dict[str, Any]:
        """The object that a command that works prints with ``--json``."""
        done = self(*_words(arguments), "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def process(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """As a process of its own, in `environment`."""
        return subprocess.run(
            self.line(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it and go on; its group can be interrupted like a terminal does."""
        return subprocess.Popen(
            self.line(*arguments), cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_interrupts,
        )  # fmt: skip

    def line(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tasp_lab.cli", *_words(arguments)]

    def refused(self, *arguments: str) -> str:
        """The one line with which a wrong input is answered; checks the exit code and that nothing else was said."""
        done = self(*arguments)
        assert done.returncode == 2, done
        assert done.stdout == ""
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("tasp-lab: ")
        assert not any(path.suffix == ".tmp" for path in self.folder.iterdir())
        return lines[0]


def _words(arguments: Sequence[str]) -> list[str]:
    return shlex.split(arguments[0]) if len(arguments) == 1 else list(arguments)


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        main(_words(arguments))
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def assert_gone(processes: Iterable[int]) -> None:
    """All these processes end within seconds."""
    waited_for = list(processes)
    deadline_s = time.monotonic() + 5
    while any(map(is_running, waited_for)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_running, waited_for))


def is_running(process: int) -> bool:
    """Whether a process exists and is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
