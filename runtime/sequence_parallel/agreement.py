"""Agreement: ranks exchange their parameters before data moves, so that a mismatch raises instead of deadlocking.

>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> call = Call(None, timeout_s=300.0)
>>> call.agree({"kind": "softmax", "positions": 16}, apart=["positions"])  # before data of the forward pass move
[{'kind': 'softmax', 'positions': 16}]
>>> call.agree_on_backward()                                               # before those of the backward pass do
>>> dist.destroy_process_group()

If a rank has exchanged the same parameters before, it sends a token of that exchange in their place. If the tokens of
all ranks are equal, the parameters of that exchange still hold; else all ranks exchange theirs again. No rank decides
by itself: a longer shard on one rank changes the schedule of all, and a rank that did not wait would send messages that
no other rank receives, and hang.

Layers of one shape exchange equal messages, and most transports match messages by their order alone. So ranks that go
back through two such layers in different orders would add up gradients of both. The calls of a group are numbered, and
a backward pass agrees on the number of its call, which is part of the token. So does a forward pass that a reentrant
checkpoint runs again.

So every pass waits for all hosts, but for no device: the exchange goes over gloo, also where data move over NCCL,
whose waits poll once a millisecond and begin when all kernels queued before have ended. It has connections of its own
(`runtime.sequence_parallel.failures`). Every rank sends its token to every other one, so a rank that does not come is
known; and no collective comes between those of the caller, whose order may differ (DistributedDataParallel reduces
gradients while a backward pass goes on).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from runtime.executor.messages import Group, LostPeer, LostRankError, Message, Transport, Wait, call_peers
from runtime.executor.transports import AGREEMENT_TAG, PointToPoint
from runtime.sequence_parallel.failures import hosts_of, ranks_in_words
from tasp_lab.core.errors import RunError, first_line

_MAX_BYTES = 2048
"""Fixed size of every rank's message; strings in it are truncated to `_MAX_LETTERS`."""

_MAX_LETTERS = 180

_TOKEN_BYTES = 16
"""Bytes of the token that a rank sends; a rank that has none sends zeros."""

_REMEMBERED = 64
"""Exchanges that a rank remembers per group. Ranks that remember different ones exchange again."""

_MOST_PASSES = 4
"""How many different passes an error names; a world may have as many as ranks."""


Proposal = Mapping[str, object]
"""The parameters with which a rank calls a collective: names and JSON values."""


class Call:
    """A call of a layer that all ranks of a group make together, and its backward pass.

    `number` counts the calls of the group, from 1; `layer` describes the layer in errors. A layer that is `prepared` is
    agreed on once, for all calls of it.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._hosts = hosts_of(group)
        self.number, self.layer, self.prepared = self._hosts.calls + 1, "", False

    def agree(self, own: Proposal | Exception, apart: Collection[str] = ()) -> list[Proposal]:
        """As the function `agree`, in the forward pass; the call then counts."""
        checkpoints, again = _checkpoints_around()
        pass_ = "" if again is None else f"the forward pass, run again, of {again.described()}"
        proposals = agree(own, self._group, self._timeout_s, apart, pass_)
        self._hosts.calls = self.number
        for each in checkpoints:
            if not hasattr(each, _FIRST_CALL):
                setattr(each, _FIRST_CALL, self)
        return proposals

    def agree_on_backward(self, computed_as: int | None = None, problem: Exception | None = None) -> None:
        """Raise `RunError` on all ranks, naming their calls, unless all of them go back through this call now.

        A rank that cannot, passes its `problem`, see `agree`.

        `computed_as`: the number of the call that computed what the pass starts from, another one after a checkpoint
        without reentry. It must be equal, too: such a checkpoint runs a forward pass again without knowing of which
        call.
        """
        if not self.prepared:
            agree(problem or {}, self._group, self._timeout_s, pass_=f"{_BACKWARD}{self.described(computed_as)}")

    @contextlib.contextmanager
    def running(self, transport: Transport, computed_as: int | None = None, backward: bool = False) -> Iterator[None]:
        """Around a pass: an error ends it on all ranks. Messages of hosts go over their own connections."""

        def during() -> str:
            return f"{_BACKWARD if backward else 'the forward pass of '}{self.described(computed_as)}"

        with self._hosts.together(during, on_gpus=transport.waited_on_gpu):
            if transport.waited_on_gpu is None:
                transport.use(self._hosts.connect(self._timeout_s))
            yield

    def described(self, computed_as: int | None = None) -> str:
        """In words, for errors. Numbers come first, as long texts are cut."""
        if self.prepared:
            return f"a prepared layer ({self.layer})"
        again = "" if computed_as in (None, self.number) else f", computed again as call {computed_as}"
        return f"call {self.number} of {self._hosts.calls}{again} ({self.layer})"


def agree(
    own: Proposal | Exception, group: Group, timeout_s: float, apart: Collection[str] = (), pass_: str = ""
) -> list[Proposal]:
    """The proposals of all ranks of a group, in rank order, equal but for the values of the names `apart`.

    Raises `RunError` with the first rank whose value differs from rank 0, and both values.

    A rank that cannot take part passes its error instead. It then raises this error, and all other ranks raise
    `RunError` that names the first such rank.

    `pass_` names the pass of an earlier call that is about to run. Raises `RunError` on all ranks if it differs.
    """
    message = {"problem": first_line(own)} if isinstance(own, Exception) else own
    text, exchanges = json.dumps(_truncated(message)), hosts_of(group).exchanges
    before, proposals = exchanges.get(text, (b"", []))
    token = _digest(before, pass_.encode()) if before else bytes(_TOKEN_BYTES)
    with torch._C._DisableFuncTorch():  # torch.func.grad would wrap the tensors of messages, which then have no data
        tokens = _gather(token, _TOKEN_BYTES, group, timeout_s, pass_)
        is_known = bool(before) and all(each == token for each in tokens)
        if not is_known:
            text_of_pass = json.dumps(_truncated({_PASS: pass_, **message}))
            texts = _gather(text_of_pass.encode(), _MAX_BYTES, group, timeout_s, pass_)
    if not is_known:
        found: list[dict[str, object]] = [json.loads(each.rstrip(b"\0")) for each in texts]
        passes = [str(each.pop(_PASS)) for each in found]
        proposals = [*found]
        if isinstance(own, Exception):
            raise own
        for rank, proposal in enumerate(proposals):
            if "problem" in proposal:
                raise RunError(f"rank {rank}: {proposal['problem']}")
        if len(set(passes)) > 1:
            raise RunError(_different_passes(passes, proposals))
        exchanges[text] = _digest(*(json.dumps(each).encode() for each in found)), proposals
    exchanges.move_to_end(text)
    if len(exchanges) > _REMEMBERED:
        exchanges.popitem(last=False)
    names = [name for name in proposals[0] if name not in apart]
    for rank, proposal in enumerate(proposals):
        for name in names:
            if proposal[name] != proposals[0][name]:
                raise RunError(f"rank {rank}: {name} is {proposal[name]}, on rank 0 it is {proposals[0][name]}")
    return proposals


_BACKWARD = "the backward pass of "

_PASS = "pass"
"""The name under which a message has its pass."""


def _different_passes(passes: Sequence[str], proposals: Sequence[Proposal]) -> str:
    """An error that names every pass, and the ranks that are about to run it."""
    ranks: dict[str, list[int]] = {}
    for rank, (pass_, proposal) in enumerate(zip(passes, proposals, strict=True)):
        kind = proposal.get("kind")
        ranks.setdefault(pass_ or (f"a new call ({kind})" if kind else "a new call"), []).append(rank)
    named = [f"{ranks_in_words(of_pass)}: {pass_}" for pass_, of_pass in ranks.items()]
    more = [f"{len(named) - _MOST_PASSES} more"] if len(named) > _MOST_PASSES else []
    return f"ranks run different passes, expected one order on all; {'; '.join([*named[:_MOST_PASSES], *more])}"


_FIRST_CALL = "_first_call_of_tasp_lab"
"""The attribute by which a checkpoint remembers the first call inside it."""


def _checkpoints_around() -> tuple[list[FunctionCtx], Call | None]:
    """The autograd functions whose forward pass makes this call, and the call that is run again by their backward pass.

    `torch.utils.checkpoint.checkpoint` with ``use_reentrant=True`` is an autograd function whose backward pass runs the
    forward pass again. The calls inside are the same for two such checkpoints; the context of the function, the
    first argument of both passes, is not.
    """
    checkpoints = []
    for name, context in _contexts_around():
        if name == "forward":
            checkpoints.append(context)
        elif hasattr(context, _FIRST_CALL):
            first: Call = getattr(context, _FIRST_CALL)
            return checkpoints, first
    return checkpoints, None


def _contexts_around() -> Iterator[tuple[str, FunctionCtx]]:
    """The contexts of autograd functions under way in this thread, the innermost first, each with the name of its pass.

    Contexts have no other public way to be found (torch has only that of the backward pass, `_current_autograd_node`).
    """
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                yield code.co_name, context


def _truncated(message: Proposal) -> dict[str, object]:
    """A message with its strings as at most `_MAX_LETTERS` ASCII characters."""
    return {
        name: value.encode("ascii", "replace").decode()[:_MAX_LETTERS] if isinstance(value, str) else value
        for name, value in message.items()
    }


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()[:_TOKEN_BYTES]


def _gather(content: bytes, size_bytes: int, group: Group, timeout_s: float, pass_: str) -> list[bytes]:
    """The contents of all ranks, filled up with zeros to this size: each rank sends its own to every other one."""
    rank, world_size, hosts = dist.get_rank(group), dist.get_world_size(group), hosts_of(group)
    own = torch.frombuffer(bytearray(content.ljust(size_bytes, b"\0")), dtype=torch.uint8)
    contents = [own if each == rank else torch.empty_like(own) for each in range(world_size)]
    peers = [each for each in range(world_size) if each != rank]

    with hosts.together(lambda: pass_):
        transport = PointToPoint(timeout_s, hosts.connect(timeout_s), torch.device("cpu"))
        waits: list[Wait] = []
        for post, data in (transport.receive, contents), (transport.send, [own] * world_size):
            try:
                waits += post([Message(peer, AGREEMENT_TAG, data[peer]) for peer in peers])
            except LostPeer as error:
                raise LostRankError(hosts.lost([peers[error.number]], error)) from None
        absent: list[int] = []
        for peer, wait in zip(peers * 2, waits, strict=True):
            try:
                call_peers(False, wait)
            except LostPeer as error:
                if error.is_late:
                    absent.append(peer)  # all that have not come, as the first wait that is late ends the others
                elif not absent:
                    raise LostRankError(hosts.lost([peer], error)) from None
        if absent:
            hint = "; is the result used in the loss there?" if pass_.startswith(_BACKWARD) else ""
            raise LostRankError(hosts.absent(sorted({*absent}), timeout_s, hint), is_late=True)
    hosts.waits = waits
    return [each.numpy().tobytes() for each in contents]
