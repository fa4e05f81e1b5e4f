"""The command line. It parses, calls the functions that Python users call, and prints what they return.

`commands` has a module per command, `options` and `options_layer` what they share, `tables` what people see; `app` puts
the commands together and `process` deals with streams, signals and exit codes.
"""

from tasp_lab.cli.process import main

__all__ = ["main"]
