"""The process around a command: its streams, errors and exit code.

Heavy modules are imported inside `main`, where Ctrl-C is handled (`tasp_lab.cli.interrupts`).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import sys
import traceback

from tasp_lab.cli.interrupts import Interrupts

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn, TextIO

    from cyclopts import CycloptsError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: exit 0 on success, 2 with one line on an error, 130 after Ctrl-C, 1 where `check` finds a
    slow machine.

    If the reader of the output ended first, as in ``tasp-lab ... | head``, it is `READER_LEFT`, without a line. With
    ``--json`` an error is also one object on standard output, ``{"error": ...}``. By default the arguments are those
    of this process.
    """
    is_process = arguments is None
    given = sys.argv[1:] if arguments is None else list(arguments)
    with Interrupts() as interrupts:
        try:
            _prepare_streams()
            if is_process:
                # Modules, tables, schedules and answers live until the command ends: to look through them again and
                # again takes a twentieth of `compare`, and once, of the modules alone, of a short `predict`.
                gc.set_threshold(1_000_000)
            _run(given)
            if is_process:
                interrupts.ignore_from_now_on()
                gc.freeze()  # the system takes the memory back: to look for garbage in it takes as long as to import
        except KeyboardInterrupt:
            _leave(130, "interrupted")
        except Exception:
            if interrupts.heard:  # some libraries turn an interrupt of their import into an ImportError
                _leave(130, "interrupted")
            from tasp_lab.core.process import leave, leaves_at_once

            if leaves_at_once():
                traceback.print_exc()
                leave(1)
            raise


READER_LEFT = 141
"""The exit code if the reader of the output ended first: 128 + SIGPIPE, as shells report programs that it ends."""


def _reader_has_left() -> bool:
    """Whether the broken pipe is that of an output, not one to another process."""
    import select

    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in outputs.poll(0))


def _run(arguments: Sequence[str]) -> None:
    from cyclopts import CycloptsError
    from cyclopts.exceptions import UnusedCliTokensError

    from tasp_lab.cli.app import app_of
    from tasp_lab.core.errors import TaspLabError

    document: dict[str, object] = {}
    try:
        app = app_of(*arguments[:1])
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        if code:  # the verdict of a command, such as check
            sys.exit(code)
        return
    except UnusedCliTokensError as error:
        unused = [repr(token) for token in error.unused_tokens or ()]
        message = f"unexpected argument{'s' * (len(unused) > 1)} {', '.join(unused)}, see {_help_of(error)}"
    except CycloptsError as error:
        message = _usage_error(error, arguments)
    except TaspLabError as error:
        message, document = str(error), dict(error.document)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich exits with 1
            _leave(READER_LEFT)
        raise
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            _leave(READER_LEFT)
        reason = error.strerror or str(error)
        message = reason if error.filename is None else f"{error.filename}: {reason}"
    except MemoryError:
        message = "not enough memory"
    _refuse(message, arguments, document)


_NO_OPTIONS = {
    "--tp": "Tensor parallelism is not predicted: give predict or compare the heads of one of its ranks, as in "
    "--heads 8 --kv-heads 1.",
    "--pp": "Pipeline parallelism is not predicted.",
    "--without-link": "Did you mean --without link.0-3?",
    "--link": "Did you mean --set link.0-3=10GB/s?",
    "--csv": "study show writes CSV; in Python, results have to_pandas().",
}
"""What to do instead of options that other tools have."""


def _usage_error(error: CycloptsError, arguments: Sequence[str]) -> str:
    """The message for a command line that cannot be read."""
    from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError

    from tasp_lab.core.errors import nearest

    command = " ".join(error.command_chain or ())
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        known = {name.strip("-"): name for each in error.argument_collection if each.parse for name in each.names}
        near = nearest(option.strip("-"), known, at_least=0.7)  # of many short names, some resemble any word
        hint = _NO_OPTIONS.get(option) or (f"Did you mean {known[near[0]]}?" if near else "")
        return f"Unknown option: {option}. {hint or f'{_help_of(error)} lists all.'}"
    if isinstance(error, UnknownCommandError):
        if arguments[0].startswith("-"):
            return f"option {arguments[0]!r} before the command, expected it after: tasp-lab COMMAND ... {arguments[0]}"
        told = str(error).partition(" Available commands")[0]  # only the first few of them
        return f"{told} {_help_of(error)} lists all."
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        name = error.argument.name
        if not any(each.partition("=")[0] in error.argument.names for each in arguments):
            short = next((each for each in arguments if f"-{each.partition('=')[0]}" == name), "")
            hint = f"did you mean {name} for {short}?" if short else f"see {_help_of(error)}"
            return f"{command}: {name} is missing, {hint}"
    return str(error)


def _help_of(error: CycloptsError) -> str:
    return " ".join(["tasp-lab", *(error.command_chain or ()), "--help"])


def _refuse(message: str, arguments: Sequence[str], document: dict[str, object]) -> NoReturn:
    """Exit with 2 and the message, also as JSON if it was requested, beside what a document has."""
    from tasp_lab.cli.console import print_json
    from tasp_lab.core.progress import on_one_line

    line = on_one_line(message)
    if wants_json(arguments):
        with contextlib.suppress(OSError):
            print_json(document | {"error": line})
    _leave(2, line)


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the arguments, which may be invalid otherwise.

    >>> wants_json(["doctor", "--json"]), wants_json(["--json=true"]), wants_json(["--json=no"]), wants_json([])
    (True, True, False, False)
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(each == "--json" or each.lower() in _JSON_IS_TRUE for each in options)


_JSON_IS_TRUE = {f"--json={text}" for text in ("yes", "y", "1", "true", "t")}


def _prepare_streams() -> None:
    """Refuse output to a closed stdout, discard that to a closed stderr, and replace characters that stdout lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # its descriptor is taken, so that no file gets it
            stream = open(os.devnull, "w")  # noqa: SIM115
            setattr(sys, name, _Closed(stream) if name == "stdout" else stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _Closed(io.TextIOBase):
    """A standard output that is closed: a command that prints nothing succeeds. `stream` has its descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "is closed, expected a place for the output", "standard output")


def _leave(code: int, message: str = "") -> NoReturn:
    """Exit with a message on one line; buffered output that cannot be written is dropped."""
    from tasp_lab.core.progress import print_line

    with contextlib.suppress(OSError):
        if message:
            print_line(f"tasp-lab: {message}", sys.stderr)
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, io.StringIO())
    from tasp_lab.core.process import leave

    leave(code)
