"""Ranks as processes: a nursery imports torch once, forks one process per rank, and reports how each of them ends.

Started by `runtime.launcher` as ``python -m runtime.worker CHANNEL`` where CHANNEL is the descriptor of a connection
that brings one `RankSetup` per rank. Importing torch takes seconds of a core; forking shares that among all ranks.
A forked rank has one thread, so it may still join a user namespace. The kernel kills the ranks when the nursery
ends, and the nursery when the launcher ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from runtime.namespaces import CLONE_NEWNET, CLONE_NEWUSER, die_with_parent, join_namespace
from runtime.perform import perform
from runtime.pulse import IDLE, WORKING, Pulse
from runtime.setup import RankSetup
from tasp_lab.errors import TaspLabError


def main() -> None:
    """The nursery."""
    die_with_parent()
    launcher: Connection = Connection(int(sys.argv[1]))
    setups: list[RankSetup] = launcher.recv()
    rank_of = {_fork(setup): setup.rank for setup in setups}
    for setup in setups:
        os.close(setup.channel)
    while rank_of:
        process, status = os.wait()
        launcher.send((rank_of.pop(process), os.waitstatus_to_exitcode(status)))


def _fork(setup: RankSetup) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _be_rank(setup)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _write_to(log_path: str) -> None:
    """Let everything that this process prints go to a file."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _be_rank(setup: RankSetup) -> None:
    die_with_parent()
    _write_to(setup.log_path)
    if setup.user_namespace >= 0:
        join_namespace(setup.user_namespace, CLONE_NEWUSER)
        die_with_parent()  # joining a user namespace clears the wish
    if setup.network_namespace >= 0:
        join_namespace(setup.network_namespace, CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = setup.interface
    channel: Connection = Connection(setup.channel)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the launcher is gone
        _serve(setup, channel)


def _serve(setup: RankSetup, channel: Connection) -> None:
    torch.set_num_threads(1)
    pulse = Pulse(setup.pulse_descriptor, setup.world_size)
    pulse.report(setup.rank, IDLE)
    pulse.beat(setup.rank)
    store = f"file://{setup.store_path}"
    dist.init_process_group("gloo", init_method=store, rank=setup.rank, world_size=setup.world_size)
    channel.send(("ready", None))
    while True:
        job, timeout_s = channel.recv()
        pulse.report(setup.rank, WORKING)
        answer: tuple[str, object]
        try:
            answer = ("done", perform(job, timeout_s, lambda _, peer: pulse.report(setup.rank, peer)))
        except TaspLabError as error:
            answer = ("failed", str(error))
        except Exception:
            answer = ("crashed", traceback.format_exc())
        pulse.report(setup.rank, IDLE)
        channel.send(answer)


if __name__ == "__main__":
    main()
