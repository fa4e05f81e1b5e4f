"""Agreement: ranks exchange their parameters before data moves, so that a mismatch raises instead of deadlocking."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.executor.transports import Group
from tasp_lab.errors import RunError, TaspLabError, first_line

_MAX_BYTES = 2048
"""Fixed size of every rank's message; strings in it are truncated to `_MAX_LETTERS`."""

_MAX_LETTERS = 180

Proposal = Mapping[str, object]
"""The parameters with which a rank calls a collective: names and JSON values."""


def exchange(own: Proposal | TaspLabError, device: torch.device, group: Group, timeout_s: float) -> list[Proposal]:
    """The proposals of all ranks of a group, in rank order.

    A rank that cannot take part passes its error instead. It then raises this error, and all other ranks raise
    `RunError` that names the first such rank.
    """
    message = {"problem": first_line(own)} if isinstance(own, TaspLabError) else own
    truncated = {name: _truncated(value) if isinstance(value, str) else value for name, value in message.items()}
    proposals = [json.loads(text) for text in _all_gather_text(json.dumps(truncated), device, group, timeout_s)]
    if isinstance(own, TaspLabError):
        raise own
    for rank, proposal in enumerate(proposals):
        if "problem" in proposal:
            raise RunError(f"rank {rank}: {proposal['problem']}")
    return proposals


def require_equal(proposals: Sequence[Proposal], names: Sequence[str]) -> None:
    """Raise `RunError` with the first rank whose value of one of these names differs from rank 0, and both values."""
    for rank, proposal in enumerate(proposals):
        for name in names:
            if proposal[name] != proposals[0][name]:
                raise RunError(f"rank {rank}: {name} is {proposal[name]}, on rank 0 it is {proposals[0][name]}")


def _truncated(text: str) -> str:
    """A string as at most `_MAX_LETTERS` ASCII characters."""
    return text.encode("ascii", "replace").decode()[:_MAX_LETTERS]


def _all_gather_text(text: str, device: torch.device, group: Group, timeout_s: float) -> list[str]:
    own = torch.zeros(_MAX_BYTES, dtype=torch.uint8)
    encoded = text.encode()
    own[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    own = own.to(device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(gathered, own, group=group, async_op=True)
        assert work is not None, "this process is part of the group"
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RunError(f"rank {dist.get_rank(group)}: lost a rank before the start ({first_line(error)})") from None
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in torch.stack(gathered).cpu()]
