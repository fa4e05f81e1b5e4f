"""Agreement: ranks exchange their parameters before data moves, so that a mismatch raises instead of deadlocking.

A call with parameters that the rank has exchanged before sends a token of that exchange in their place. Only if the
tokens of all ranks are equal is what they said then taken for what they say now; else all exchange their parameters
once more. No rank decides by itself: a shard that is longer than before on one rank changes the schedule of all, and a
rank that did not wait to hear of it would send messages that nobody expects, and hang.

So every call waits for all hosts, but for no device: the exchange goes over gloo, also where data move over NCCL,
whose waits poll once a millisecond and begin when all kernels queued before have ended.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from runtime.executor.transports import Group, LostPeer, beside, call_peers, wait_for
from tasp_lab.errors import RunError, TaspLabError, first_line

_MAX_BYTES = 2048
"""Fixed size of every rank's message; strings in it are truncated to `_MAX_LETTERS`."""

_MAX_LETTERS = 180

_TOKEN_BYTES = 16
_NO_TOKEN = bytes(_TOKEN_BYTES)

_REMEMBERED = 64
"""Exchanges that a rank remembers per group. Ranks that remember different ones exchange again."""

Proposal = Mapping[str, object]
"""The parameters with which a rank calls a collective: names and JSON values."""


class _Exchange(NamedTuple):
    """What all ranks said in an exchange, and the token of it: a digest, equal on all ranks."""

    token: bytes
    proposals: list[Proposal]


_KNOWN: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[str, _Exchange]] = WeakKeyDictionary()
"""By group, the latest exchanges by what this rank said."""

_HOSTS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""By group without a backend for CPU memory, a group of the same ranks that has one."""


def exchange(own: Proposal | TaspLabError, group: Group, timeout_s: float) -> list[Proposal]:
    """The proposals of all ranks of a group, in rank order.

    A rank that cannot take part passes its error instead. It then raises this error, and all other ranks raise
    `RunError` that names the first such rank.
    """
    message = {"problem": first_line(own)} if isinstance(own, TaspLabError) else own
    text = json.dumps({name: _truncated(value) if isinstance(value, str) else value for name, value in message.items()})
    known, hosts = _KNOWN.setdefault(_of_all(group), OrderedDict()), _group_of_hosts(group, timeout_s)
    before = known.get(text)
    tokens = _all_gather(_NO_TOKEN if before is None else before.token, _TOKEN_BYTES, hosts, timeout_s)
    if before is not None and all(token == before.token for token in tokens):
        known.move_to_end(text)
        return before.proposals
    texts = _all_gather(text.encode(), _MAX_BYTES, hosts, timeout_s)
    proposals: list[Proposal] = [json.loads(each.rstrip(b"\0")) for each in texts]
    if isinstance(own, TaspLabError):
        raise own
    for rank, proposal in enumerate(proposals):
        if "problem" in proposal:
            raise RunError(f"rank {rank}: {proposal['problem']}")
    known[text] = _Exchange(hashlib.sha256(b"".join(texts)).digest()[:_TOKEN_BYTES], proposals)
    known.move_to_end(text)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
    return proposals


def agree(own: Proposal | TaspLabError, group: Group, timeout_s: float, apart: Collection[str] = ()) -> list[Proposal]:
    """As `exchange`, of proposals that are equal but for the values of the names `apart`.

    Raises `RunError` with the first rank whose value differs from rank 0, and both values.
    """
    proposals = exchange(own, group, timeout_s)
    names = [name for name in proposals[0] if name not in apart]
    for rank, proposal in enumerate(proposals):
        for name in names:
            if proposal[name] != proposals[0][name]:
                raise RunError(f"rank {rank}: {name} is {proposal[name]}, on rank 0 it is {proposals[0][name]}")
    return proposals


def _truncated(text: str) -> str:
    """A string as at most `_MAX_LETTERS` ASCII characters."""
    return text.encode("ascii", "replace").decode()[:_MAX_LETTERS]


def _of_all(group: Group) -> dist.ProcessGroup:
    found = group or dist.group.WORLD
    assert found is not None, "there is a process group"
    return found


def _group_of_hosts(group: Group, timeout_s: float) -> dist.ProcessGroup:
    """The group, or one of the same ranks that can send what is in CPU memory, made by the first call of all ranks."""
    own = _of_all(group)
    if "cpu:" in dist.get_backend_config(group):
        return own
    if own not in _HOSTS:
        try:
            _HOSTS[own] = call_peers(False, beside, group, backend="gloo", timeout=timedelta(seconds=timeout_s))
        except LostPeer as error:
            raise RunError(
                f"rank {dist.get_rank(group)}: ranks compare their arguments over gloo, which does not start "
                f"({error}); GLOO_SOCKET_IFNAME names the interface"
            ) from None
    return _HOSTS[own]


def _all_gather(content: bytes, size_bytes: int, group: dist.ProcessGroup, timeout_s: float) -> list[bytes]:
    """The contents of all ranks, filled up with zeros to this size."""
    own = torch.frombuffer(bytearray(content.ljust(size_bytes, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    try:
        work = call_peers(False, dist.all_gather, gathered, own, group=group, async_op=True)
        assert work is not None, "this process is part of the group"
        wait_for(work, timedelta(seconds=timeout_s))
    except LostPeer as error:
        raise RunError(f"rank {dist.get_rank(group)}: lost a rank before the start ({error})") from None
    return [each.numpy().tobytes() for each in gathered]
