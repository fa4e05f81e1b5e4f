"""Before data moves, all ranks say what they are about to do: who differs is named, and nobody waits for anybody."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.transport import Group
from tasp_lab.errors import RunError, TaspLabError, first_line

_MOST_BYTES = 1024
"""Every rank sends as much; of a text in what it has to say, `_MOST_LETTERS` at most."""

_MOST_LETTERS = 180

Proposal = Mapping[str, object]
"""What a rank is about to do: names and JSON values."""


def exchange(own: Proposal | TaspLabError, device: torch.device, group: Group, timeout_s: float) -> list[Proposal]:
    """The proposals of all ranks of a group, in their order.

    A rank that found out that it cannot take part gives its error instead; then all ranks raise `RunError` that names
    the first such rank, and it itself raises its error.
    """
    said = {"problem": first_line(own)} if isinstance(own, TaspLabError) else own
    cut = {name: _cut(value) if isinstance(value, str) else value for name, value in said.items()}
    everyone = [json.loads(text) for text in _all_gather_text(json.dumps(cut), device, group, timeout_s)]
    if isinstance(own, TaspLabError):
        raise own
    for rank, proposal in enumerate(everyone):
        if "problem" in proposal:
            raise RunError(f"rank {rank}: {proposal['problem']}")
    return everyone


def demand_equal(proposals: Sequence[Proposal], names: Sequence[str]) -> None:
    """Raise `RunError` that names the first rank that differs from rank 0 in one of these, and how."""
    for rank, proposal in enumerate(proposals):
        for name in names:
            if proposal[name] != proposals[0][name]:
                raise RunError(f"rank {rank}: {name} is {proposal[name]}, on rank 0 it is {proposals[0][name]}")


def _cut(text: str) -> str:
    """A text that takes no more bytes than letters."""
    return text.encode("ascii", "replace").decode()[:_MOST_LETTERS]


def _all_gather_text(text: str, device: torch.device, group: Group, timeout_s: float) -> list[str]:
    own = torch.zeros(_MOST_BYTES, dtype=torch.uint8)
    said = text.encode()
    own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    own = own.to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(everyone, own, group=group, async_op=True)
        assert work is not None, "this process is part of the group"
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RunError(f"rank {dist.get_rank(group)}: lost a rank before the start ({first_line(error)})") from None
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in torch.stack(everyone).cpu()]
