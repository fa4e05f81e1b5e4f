"""The application of all commands; a command imports its analysis when it is called."""

from __future__ import annotations

from cyclopts import App

from tasp_lab import __version__
from tasp_lab.cli.commands.cache import cache
from tasp_lab.cli.commands.check import check
from tasp_lab.cli.commands.export import export
from tasp_lab.cli.commands.fabric import doctor, gpu_check, validate
from tasp_lab.cli.commands.machines import decompose, profile, topologies
from tasp_lab.cli.commands.measure import accuracy, calibrate
from tasp_lab.cli.commands.plan import plan
from tasp_lab.cli.commands.predict import compare, predict, search, step
from tasp_lab.cli.commands.study import study

app = App(
    name="tasp-lab",
    help="Predict, run and compare sequence-parallel schedules: ring and multi-ring collectives and attention.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # `process.main` reports it
)
app["--help"].group = app["--version"].group = "Options"
app.command(topologies)
app.command(decompose, sort_key=2)
app.command(predict, sort_key=3)
app.command(validate, sort_key=4)
app.command(compare, sort_key=5)
app.command(search, sort_key=5)
app.command(step, sort_key=5)
app.command(plan, sort_key=5)
app.command(export, sort_key=5)
app.command(study)
app.command(check, sort_key=6)
app.command(accuracy, sort_key=6)
app.command(calibrate, sort_key=7)
app.command(profile)
app.command(cache, sort_key=9)
app.command(doctor, sort_key=9)
app.command(gpu_check, sort_key=10)
app.register_install_completion_command(
    help="Install completion for bash, zsh or fish; see --install-completion --help.", group="Options"
)
