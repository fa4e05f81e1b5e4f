"""Settings of all tests, and fixtures for those that start real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("tasp-lab", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tasp-lab")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs ``tasp-lab`` as a user would, in an empty folder."""
    return Command(tmp_path)


class Command:
    """The command line as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error::DeprecationWarning:tasp_lab",
        }

    def __call__(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.line(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it and go on; its group can be interrupted like a terminal does."""
        return subprocess.Popen(
            self.line(*arguments), cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def line(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tasp_lab.cli", *arguments]

    def refused(self, *arguments: str) -> str:
        """The one line with which a wrong input is answered; checks the exit code and that nothing else was said."""
        done = self(*arguments)
        assert done.returncode == 2, done
        assert done.stdout == ""
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("tasp-lab: ")
        assert list(self.folder.iterdir()) == [] or not any(p.suffix == ".tmp" for p in self.folder.iterdir())
        return lines[0]
