"""Calls of a function on real ranks: processes of their own that talk over gloo and real sockets."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parent.parent


def on_ranks(function: Callable[..., object], world_size: int, *arguments: object) -> list[object]:
    """What each rank's call of ``function(*arguments)`` returned, or the exception that it raised, or its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranks"],
        input=pickle.dumps((function, world_size, arguments)),
        capture_output=True,
        cwd=ROOT,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    if done.returncode:
        raise AssertionError(done.stderr.decode())
    found: list[object] = pickle.loads(done.stdout)
    return found


def main() -> None:
    function, world_size, arguments = pickle.loads(sys.stdin.buffer.read())
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        pipes = [Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _start(rank, theirs, world_size, folder, function, arguments) for rank, (_, theirs) in enumerate(pipes)
        ]
        for _, theirs in pipes:
            theirs.close()
        found = [_answer(ours) for ours, _ in pipes]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    answers.write(pickle.dumps([code if value is None else value[0] for value, code in zip(found, codes, strict=True)]))


def _answer(ours: Connection) -> tuple[object] | None:
    try:
        return (ours.recv(),)
    except EOFError:
        return None


def _start(
    rank: int, answer: Connection, world_size: int, folder: str, function: Callable[..., object], arguments: object
) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        answer.send(_call(rank, world_size, folder, function, arguments))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _call(rank: int, world_size: int, folder: str, function: Callable[..., object], arguments: object) -> object:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size, rank)
    try:
        return function(*arguments)  # type: ignore[misc]
    except Exception as error:
        return error


if __name__ == "__main__":
    main()
