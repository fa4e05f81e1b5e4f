"""Calls of a function on real ranks: processes of their own that talk over gloo and real sockets.

One server per test process imports torch and the tests' modules once, and forks the ranks of every call. What else
each rank would import for itself, a test module names in a tuple `IMPORTED_BY_RANKS`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runtime.linux import die_with_parent

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def on_ranks(function: Callable[..., object], world_size: int, *arguments: object) -> list[object]:
    """What each rank's call of ``function(*arguments)`` returned, or the exception that it raised, or its exit code."""
    return _called(_join_group, function, world_size, arguments)


def succeeded(answers: list[Any]) -> list[Any]:
    """The answers of all ranks; raises the first exception among them."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def as_if_by_torchrun(function: Callable[..., object], world_size: int, *arguments: object) -> list[object]:
    """As `on_ranks`, with the environment that torchrun gives its ranks, but not yet in a process group."""
    return _called(_set_environment, function, world_size, arguments)


def _called(
    join: Callable[[int, int, str], None], function: Callable[..., object], world_size: int, arguments: Sequence[object]
) -> list[object]:
    server, channel = _server()
    channel.send((join, function, world_size, arguments))
    try:
        if not channel.poll(LIMIT_S):
            raise AssertionError(f"{function} on {world_size} ranks has not ended within {LIMIT_S} s")
        found: list[object] | str = channel.recv()
    except BaseException:  # of pytest-timeout, too: what goes on would answer the next call
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        _server.cache_clear()
        raise
    assert isinstance(found, list), found
    return found


@cache
def _server() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            start_new_session=True,
        )
    return server, ours


def main() -> None:
    """The server: one call after the other, until the test process ends."""
    die_with_parent()
    calls: Connection = Connection(int(sys.argv[1]))
    while True:
        try:
            join, function, world_size, arguments = calls.recv()
        except EOFError:
            return
        try:
            for name in getattr(sys.modules[function.__module__], "IMPORTED_BY_RANKS", ()):
                import_module(name)
            calls.send(_answers(join, function, world_size, arguments))
        except Exception:
            calls.send(traceback.format_exc())


def _answers(
    join: Callable[[int, int, str], None], function: Callable[..., object], world_size: int, arguments: Sequence[object]
) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        pipes = [Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _start(theirs, partial(join, rank, world_size, folder), partial(function, *arguments))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for _, theirs in pipes:
            theirs.close()
        found = [_answer(ours) for ours, _ in pipes]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    return [code if value is None else value[0] for value, code in zip(found, codes, strict=True)]


def _answer(ours: Connection) -> tuple[object] | None:
    with ours:
        try:
            return (ours.recv(),)
        except EOFError:
            return None


def _start(answer: Connection, join: Callable[[], None], call: Callable[[], object]) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        die_with_parent()
        join()
        answer.send(_result(call))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _result(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return error


def _join_group(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), world_size, rank)
    dist.barrier()  # a rank whose call ends at once must not fail one that still connects


def _set_environment(rank: int, world_size: int, folder: str) -> None:
    """As torchrun does; ranks meet at a file where it would be a port, which another process might take."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    init = dist.init_process_group
    store = f"file://{folder}/store"
    dist.init_process_group = partial(init, init_method=store, rank=rank, world_size=world_size)


if __name__ == "__main__":
    main()
