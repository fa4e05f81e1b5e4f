"""The command line. It parses, calls the functions that Python users call, and prints what they return.

`commands` has a module per command, `options` and `options_layer` what they share, `console` what people see; `app`
puts the commands together and `process` deals with streams, errors and exit codes. `main` handles Ctrl-C before it
imports any of them.
"""

import sys

from tasp_lab.cli.interrupts import Interrupts

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: "Sequence[str] | None" = None) -> None:
    """Run the command line, see `tasp_lab.cli.process.main`."""
    with Interrupts():
        try:
            from tasp_lab.cli.process import main as run

            run(arguments)
        except KeyboardInterrupt:  # before `run` began
            sys.stderr.write("tasp-lab: interrupted\n")
            sys.exit(130)
