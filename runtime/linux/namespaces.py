"""Linux namespaces by calls to the C library that Python 3.11 does not wrap.

This module must not import torch or numpy: a process that joins a user namespace must be single-threaded.
"""

from __future__ import annotations

import ctypes
import os
import signal

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces. Raises `OSError`."""
    if _libc.unshare(flags) != 0:
        _raise_errno("unshare")


def join_namespace(descriptor: int, kind: int) -> None:
    """Move the calling thread into the namespace of a descriptor. Raises `OSError`."""
    if _libc.setns(descriptor, kind) != 0:
        _raise_errno("setns")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Request a signal for this process when its parent ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        _raise_errno("prctl")


def enter_user_namespace() -> None:
    """Become root of a new user namespace, which allows network namespaces without privileges. Raises `OSError`."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{file}", "w") as stream:
            stream.write(text)


def _raise_errno(call: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{call}: {os.strerror(code)}")
