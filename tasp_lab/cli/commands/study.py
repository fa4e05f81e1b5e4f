"""``tasp-lab study``: many points at once, kept in a folder."""

from __future__ import annotations

from cyclopts import App

from tasp_lab.cli.commands.study_crossover import crossover
from tasp_lab.cli.commands.study_diff import diff
from tasp_lab.cli.commands.study_plot import plot
from tasp_lab.cli.commands.study_report import report
from tasp_lab.cli.commands.study_run import check, run
from tasp_lab.cli.commands.study_sensitivity import sensitivity
from tasp_lab.cli.commands.study_show import show
from tasp_lab.cli.commands.study_validate import validate

study = App(name="study", sort_key=7, help="Studies of many points: which schedule, from where on, how sure.")
for verb in (check, run, show, plot, crossover, sensitivity, validate, diff, report):
    study.command(verb)
