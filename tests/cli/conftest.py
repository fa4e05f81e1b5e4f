"""Commands that are run in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasp_lab.cli.process import main

Tell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Runs a command in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(arguments)
        except SystemExit as left:
            code = int(left.code or 0)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run
