"""What `compare` shows while it runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from dataclasses import dataclass

import pytest

from tests.conftest import Command
from tests.support.signals import hear_interrupts

NAMES = ("tasp", "ulysses", "token-ring")
COMPARE = ("compare", "full-mesh:4", "--seq", "4Ki", "--heads", "8", *(f"--schedule={name}" for name in NAMES))
LINES = [f"{number} of 3: {name}" for number, name in enumerate(NAMES, start=1)]


@dataclass
class OnTerminal:
    """A process whose standard error is a terminal."""

    process: subprocess.Popen[bytes]
    terminal: int
    shown: str = ""

    @classmethod
    def start(cls, command: Command, *arguments: str, term: str = "xterm") -> OnTerminal:
        terminal, inside = pty.openpty()
        environment = command.environment | {"TERM": term, "COLUMNS": "100", "NO_COLOR": "1"}
        with (command.folder / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                command.line(*arguments), cwd=command.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=stdout, stderr=inside, preexec_fn=hear_interrupts,
            )  # fmt: skip
        os.close(inside)
        return cls(process, terminal)

    def read(self, until: str | None = None) -> str:
        """What is shown up to a text, or to the end."""
        while until is None or until not in self.shown:
            try:
                part = os.read(self.terminal, 65536)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                assert until is None, f"{until!r} is not in {self.shown!r}"
                break
            self.shown += part.decode()
        return self.shown

    def end(self) -> int:
        """Read to the end; the exit code."""
        self.read()
        os.close(self.terminal)
        return self.process.wait()


def test_a_bar_on_a_terminal_shows_count_name_and_time_and_leaves_nothing(command: Command) -> None:
    running = OnTerminal.start(command, *COMPARE)
    assert running.end() == 0
    for done, name in enumerate(NAMES):
        assert re.search(rf"{done}/3 0:00:\d\d {name}\b", running.shown), running.shown
    assert not any(line in running.shown for line in LINES)
    assert running.shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is shown, and the line of the bar erased
    assert "ulysses" in (command.folder / "stdout").read_text()


def test_lines_of_progress_stand_above_the_bar(command: Command) -> None:
    running = OnTerminal.start(command, *COMPARE, "--tune")
    assert running.end() == 0
    assert running.shown.startswith("tuning 3 schedules: combinations of options to simulate: at most 21\r\n")


def test_ctrl_c_ends_the_bar_and_is_one_line(command: Command) -> None:
    running = OnTerminal.start(command, "compare", "nodes:8x8", "--seq", "64Ki", "--heads", "64", "--tune")
    running.read(until="0/")
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 130
    assert running.shown.endswith("\x1b[2Ktasp-lab: interrupted\r\n")
    assert running.shown.count("\x1b[?25l") == running.shown.count("\x1b[?25h") == 1


@pytest.mark.parametrize(("term", "more"), [("dumb", ()), ("xterm", ("--json",))])
def test_lines_on_a_terminal_that_cannot_erase_and_with_json(
    command: Command, term: str, more: tuple[str, ...]
) -> None:
    running = OnTerminal.start(command, *COMPARE, *more, term=term)
    assert running.end() == 0
    assert running.shown.splitlines() == LINES
    if more:
        assert len(json.loads((command.folder / "stdout").read_text())["results"]) == 3


def test_lines_where_there_is_no_terminal(command: Command) -> None:
    done = command(*COMPARE)
    assert (done.returncode, done.stderr.splitlines()) == (0, LINES)


def test_what_is_refused_on_a_terminal_is_one_line(command: Command) -> None:
    running = OnTerminal.start(command, "compare", "full-mesh:4", "--seq", "64", "--schedule", "no-such")
    assert running.end() == 2
    assert running.shown.startswith("tasp-lab: unknown schedule 'no-such'")
    assert running.shown.count("\n") == 1
