"""The command line. The only part of `tasp_lab` that imports `sim` and `runtime`."""

from tasp_lab.cli.main import main

__all__ = ["main"]
