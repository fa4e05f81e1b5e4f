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
from collections.abc import Sequence
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
    rank_of = {_fork(setup, setups): setup.rank for setup in setups}
    for setup in setups:
        os.close(setup.channel)
    while rank_of:
        process, status = os.wait()
        launcher.send((rank_of.pop(process), os.waitstatus_to_exitcode(status)))


def _fork(setup: RankSetup, setups: Sequence[RankSetup]) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _close_others(setup, setups)
        _be_rank(setup)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _close_others(setup: RankSetup, setups: Sequence[RankSetup]) -> None:
    """Keep no other rank's channel open: the launcher must see it close when that rank ends."""
    for other in setups:
        if other.rank != setup.rank:
            os.close(other.channel)


def _write_to(log: int) -> None:
    """Let everything that this process prints go to a descriptor."""
    os.dup2(log, 1)
    os.dup2(log, 2)


def _be_rank(setup: RankSetup) -> None:
    die_with_parent()
    _write_to(setup.log)
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
    pulse = Pulse(setup.pulse, setup.world_size)
    pulse.report(setup.rank, IDLE)
    pulse.beat(setup.rank)
    store = f"file:///proc/self/fd/{setup.store}"
    dist.init_process_group("gloo", init_method=store, rank=setup.rank, world_size=setup.world_size)
    channel.send(("ready", None))
    while True:
        job, timeout_s = channel.recv()
        pulse.report(setup.rank, WORKING)
        answer: tuple[str, object]
        try:
            answer = ("done", perform(job, timeout_s, lambda peer: pulse.report(setup.rank, peer)))
        except TaspLabError as error:
            answer = ("failed", str(error))
        except Exception:
            answer = ("crashed", traceback.format_exc())
        pulse.report(setup.rank, IDLE)
        channel.send(answer)


if __name__ == "__main__":
    main()
