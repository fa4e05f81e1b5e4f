"""The application of all commands; a command imports its analysis when it is called."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from cyclopts import App

from tasp_lab import __version__

COMMANDS: dict[str, tuple[str, int | None]] = {
    "topologies": ("tasp_lab.cli.commands.machines", None),
    "decompose": ("tasp_lab.cli.commands.machines", 2),
    "predict": ("tasp_lab.cli.commands.predict", 3),
    "validate": ("tasp_lab.cli.commands.fabric", 4),
    "compare": ("tasp_lab.cli.commands.predict", 5),
    "search": ("tasp_lab.cli.commands.predict", 5),
    "step": ("tasp_lab.cli.commands.predict", 5),
    "plan": ("tasp_lab.cli.commands.plan", 5),
    "export": ("tasp_lab.cli.commands.export", 5),
    "study": ("tasp_lab.cli.commands.study", None),
    "check": ("tasp_lab.cli.commands.check", 6),
    "accuracy": ("tasp_lab.cli.commands.measure", 6),
    "calibrate": ("tasp_lab.cli.commands.measure", 7),
    "profile": ("tasp_lab.cli.commands.machines", None),
    "cache": ("tasp_lab.cli.commands.cache", 9),
    "doctor": ("tasp_lab.cli.commands.fabric", 9),
    "gpu-check": ("tasp_lab.cli.commands.fabric", 10),
}
"""The module of each command and its place in the help; applications of several commands have one of their own."""


@cache
def app_of(command: str = "") -> App:
    """The application, without the other commands if one is named: to import and read all takes 30 ms."""
    app = App(
        name="tasp-lab",
        help="Predict, run and compare sequence-parallel schedules: ring and multi-ring collectives and attention.",
        version=__version__,
        version_flags=["--version"],
        suppress_keyboard_interrupt=False,  # `process.main` reports it
    )
    app["--help"].group = app["--version"].group = "Options"
    for name in [command] if command in COMMANDS else COMMANDS:
        module, place = COMMANDS[name]
        function = getattr(import_module(module), name.replace("-", "_"))
        settings: dict[str, Any] = {} if place is None else {"sort_key": place}
        app.command(function, **settings)
    if command not in COMMANDS:
        app.register_install_completion_command(
            help="Install completion for bash, zsh or fish; see --install-completion --help.", group="Options"
        )
    return app
