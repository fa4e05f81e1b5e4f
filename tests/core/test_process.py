"""Ctrl-C while OR-tools is imported, at points that are counted and not waited for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasp_lab.core.process import deferred_interrupts
from tasp_lab.rings import cp_sat as exact_search
from tests.conftest import Command
from tests.support.signals import hear_interrupts, interrupts_heard

POINTS = 50

INITIALIZATION = f"""
import signal
import sys

interrupted_at = int(sys.modules["ortools"].__doc__)
try:
    for passed in range({POINTS}):
        if passed == interrupted_at:
            signal.raise_signal(signal.SIGINT)
except BaseException as error:
    raise ImportError("initialization failed") from error
"""
"""What pybind11 makes of an exception while an extension module is initialized."""


@pytest.fixture
def unimported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for an ``ortools`` that is imported in place of the real one, which comes back afterwards."""
    for name in [each for each in sys.modules if each.split(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "ortools/sat/python").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [each for each in sys.modules if each.split(".")[0] == "ortools"]:
        del sys.modules[name]


@pytest.mark.parametrize("point", range(POINTS))
def test_ctrl_c_is_heard_at_every_point_of_an_import_that_would_hide_it(point: int, unimported: Path) -> None:
    (unimported / "ortools/__init__.py").write_text(f'"""{point}"""')
    (unimported / "ortools/sat/python/cp_model.py").write_text(INITIALIZATION)
    with interrupts_heard(), pytest.raises(KeyboardInterrupt):
        exact_search._import_cp_model()
    assert "ortools.sat.python.cp_model" in sys.modules


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def fail_after_an_interrupt() -> None:
    with deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")


def test_an_error_of_the_block_is_the_context_of_the_interrupt() -> None:
    with interrupts_heard():
        with pytest.raises(KeyboardInterrupt) as raised:
            fail_after_an_interrupt()
        assert isinstance(raised.value.__context__, ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_leave_signals_alone() -> None:
    handlers = []

    def block() -> None:
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


INTERRUPTED = """
import signal
import sys
from importlib.machinery import ExtensionFileLoader

point, calls = int(sys.argv[1]), 0


def count_call(frame, event, argument):
    global calls
    calls += event == "call"
    if event == "call" and calls == point:
        signal.raise_signal(signal.SIGINT)


def watched(load):
    def call(loader, module):
        sys.setprofile(count_call if loader.name.startswith("ortools") else None)
        try:
            return load(loader, module)
        finally:
            sys.setprofile(None)

    return call


ExtensionFileLoader.create_module = watched(ExtensionFileLoader.create_module)
ExtensionFileLoader.exec_module = watched(ExtensionFileLoader.exec_module)

from tasp_lab.cli import main

try:
    main(["decompose", "torus:4x4", "--without", "link.0-1"])
finally:
    assert calls >= point
"""


def test_ctrl_c_while_or_tools_is_imported_is_one_line_and_130(command: Command) -> None:
    """At one of the 270 calls of Python from within the initialization of the real extension modules."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "100"], cwd=command.folder, env=command.environment,
        capture_output=True, text=True, check=False, timeout=120, preexec_fn=hear_interrupts,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (130, "")
    assert lines[-1] == "tasp-lab: interrupted"
    assert all(line.startswith("searching for ") for line in lines[:-1])
