"""The fork server: imports torch once, forks one process per rank, and reports the exit code of each.

`runtime.ranks.launcher` starts it as ``python -m runtime.ranks.fork_server CHANNEL`` where CHANNEL is the descriptor
of a connection that carries one `RankSetup` per rank. Importing torch takes seconds of CPU time, which forked ranks
share. A forked rank is single-threaded, so it can join a user namespace. The kernel kills the ranks when the fork
server ends, and the fork server when the launcher ends.
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

from runtime.linux import CLONE_NEWNET, CLONE_NEWUSER, die_with_parent, join_namespace
from runtime.protocol.heartbeat import IDLE, WORKING, Heartbeat
from runtime.protocol.jobs import RankSetup
from runtime.ranks.run_job import perform
from tasp_lab.core.errors import TaspLabError


def main() -> None:
    """Run the fork server."""
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
        for other in setups:  # so that each channel is closed for the launcher when its rank ends
            if other.rank != setup.rank:
                os.close(other.channel)
        _run_rank(setup)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run_rank(setup: RankSetup) -> None:
    die_with_parent()
    os.dup2(setup.log, 1)
    os.dup2(setup.log, 2)
    place = setup.location
    if place.user_namespace >= 0:
        join_namespace(place.user_namespace, CLONE_NEWUSER)
        die_with_parent()  # joining a user namespace clears the parent-death signal
    if place.network_namespace >= 0:
        join_namespace(place.network_namespace, CLONE_NEWNET)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    channel: Connection = Connection(setup.channel)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the launcher is gone
        _serve(setup, channel)


def _serve(setup: RankSetup, channel: Connection) -> None:
    torch.set_num_threads(1)
    heartbeat = Heartbeat(setup.heartbeat, setup.world_size)
    heartbeat.report(setup.rank, IDLE)
    heartbeat.beat(setup.rank)
    store = f"file:///proc/self/fd/{setup.store}"
    dist.init_process_group("gloo", init_method=store, rank=setup.rank, world_size=setup.world_size)
    channel.send(("ready", None))
    while True:
        job, timeout_s = channel.recv()
        heartbeat.report(setup.rank, WORKING)
        answer: tuple[str, object]
        try:
            answer = ("done", perform(job, timeout_s, lambda peer: heartbeat.report(setup.rank, peer)))
        except TaspLabError as error:
            answer = ("failed", str(error))
        except Exception:
            answer = ("crashed", traceback.format_exc())
        heartbeat.report(setup.rank, IDLE)
        channel.send(answer)


if __name__ == "__main__":
    main()
