"""Whose error it is: a peer is named only where `torch.distributed` has reported it; memory and kernels are our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.executor import transports
from runtime.executor.executor import Executor
from runtime.executor.messages import LostPeer, Message, Transport, Wait, call_peers
from runtime.executor.streams import Streams
from runtime.executor.sums import Parts
from runtime.executor.transports import AllToAll, Batched, PointToPoint
from runtime.executor.views import Views
from runtime.protocol.jobs import Job, RunSchedule
from runtime.ranks import run_job
from runtime.trials.patterns import PatternWork
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

OUR_OWN = [torch.OutOfMemoryError("CUDA out of memory"), getattr(torch, "AcceleratorError", MemoryError)("an assert")]
LOST = [dist.DistBackendError("NCCL error: remote process exited"), dist.DistNetworkError("reset by peer")]
GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


class Failing(Transport):
    """A transport of whole steps that fails at a moment: ``receive``, ``send`` or ``wait``."""

    receives_ahead, whole_steps, channels = 0, True, False

    def __init__(self, moment: str, error: Exception) -> None:
        self._moment, self._error = moment, error

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        pass

    def _post(self, messages: Sequence[Message], moment: str) -> list[Wait]:
        if self._moment == moment:
            raise self._error
        return [self._wait] * len(messages)

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return self._post(messages, "receive")

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        return self._post(messages, "send")

    def _wait(self) -> None:
        if self._moment == "wait":
            raise self._error


def run(transport: Failing) -> None:
    schedule = collective("ring", full_mesh(3), 64)
    executor = Executor(schedule, 1, transport, PatternWork(schedule, 1, checked=False), as_bytes=True)
    executor.prepare(Streams())
    executor.run()


@pytest.mark.parametrize("moment", ["receive", "send", "wait"])
@pytest.mark.parametrize("error", OUR_OWN, ids=lambda error: type(error).__name__)
def test_our_own_error_names_no_peer(moment: str, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        run(Failing(moment, error))


@pytest.mark.parametrize(("moment", "peer"), [("receive", 0), ("send", 2), ("wait", 0)])
def test_a_lost_peer_is_named(moment: str, peer: int) -> None:
    with pytest.raises(RunError, match=rf"rank 1, step 0: lost rank {peer} .*\(gone\)"):
        run(Failing(moment, LostPeer("gone")))


@pytest.mark.parametrize("call", ["recv", "send"])
def test_of_messages_posted_together_the_lost_one_is_named(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A step of `direct` on four ranks: rank 1 has messages from and to all others; only those of rank 3 fail."""

    def post(which: str) -> Callable[..., Any]:
        def posted(data: object, peer: int, tag: int) -> Any:
            if (which, peer) == (call, 3):
                raise RuntimeError("Connection closed by peer")
            return SimpleNamespace(wait=lambda timeout: None)

        return posted

    world = SimpleNamespace(recv=post("recv"), send=post("send"))
    monkeypatch.setattr(transports, "group_of", lambda group: world)
    executor = Executor(collective("direct", full_mesh(4), 8), 1, PointToPoint(1.0, None, CPU))

    def run() -> None:
        executor.prepare()  # posts the receives
        executor.run()

    with pytest.raises(RunError, match="lost rank 3"):
        run()


def test_a_kernel_without_memory_names_no_peer() -> None:
    class NoMemory:
        def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
            raise OUR_OWN[0]

        def arranged(self, fields: Views) -> Views:
            return fields

        def bound(self, blocks: Sequence[int]) -> Views:
            return (torch.zeros(8, dtype=torch.uint8),)

        sent = bound

    schedule = attention("ring-attention", full_mesh(2), Workload(8, heads=1, head_dim=2, mask="full"))
    executor = Executor(schedule, 0, Failing("", OUR_OWN[0]), NoMemory())  # type: ignore[arg-type]
    executor.prepare(Streams())
    with pytest.raises(torch.OutOfMemoryError):
        executor.run()


class FakeDist:
    """Stands in for `torch.distributed` in the transports: every call raises, or only the wait for it."""

    DistError = dist.DistError

    def __init__(self, error: Exception, in_wait: bool) -> None:
        self._error, self._in_wait = error, in_wait
        self.group = SimpleNamespace(WORLD=SimpleNamespace(send=self._call, recv=self._call, alltoall_base=self._call))

    def _call(self, *arguments: Any, **options: Any) -> Any:
        if not self._in_wait:
            raise self._error
        return SimpleNamespace(wait=self._wait)

    def AllToAllOptions(self) -> None:  # noqa: N802
        """No options."""

    @contextlib.contextmanager
    def coalesce(self, *_: object, **__: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(works=[SimpleNamespace(wait=self._wait)])

    def _wait(self, *timeout: object) -> None:
        raise self._error

    def get_world_size(self, group: object) -> int:
        return 2


@pytest.mark.parametrize("in_wait", [False, True])
@pytest.mark.parametrize("make", [PointToPoint, Batched, AllToAll])
@pytest.mark.parametrize(
    ("error", "device", "is_lost"),
    [(error, device, False) for error in OUR_OWN for device in (CPU, GPU)]
    + [(error, device, True) for error in LOST for device in (CPU, GPU)]
    + [(RuntimeError("Connection closed by peer"), CPU, True), (RuntimeError("CUDA error: no kernel"), GPU, False)],
    ids=str,
)
def test_what_transports_make_of_errors(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], error: Exception, device: torch.device, is_lost: bool,
    in_wait: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(transports, "orders_launches", lambda: False)
    fake = FakeDist(error, in_wait)
    monkeypatch.setattr(transports, "dist", fake)
    monkeypatch.setattr(transports, "group_of", lambda group: fake.group.WORLD)
    monkeypatch.setattr(transports, "_coalescing_manager", fake.coalesce)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **options: torch.zeros(*sizes, **options))
    transport, message = make(1.0, None, device), Message(1, 0, torch.zeros(1, dtype=torch.uint8))

    def exchange() -> None:
        post = transport.bind([message], [message])
        for wait in call_peers(device.type == "cuda", post):
            call_peers(device.type == "cuda", wait)

    with pytest.raises(LostPeer if is_lost else type(error)) as raised:
        exchange()
    assert str(raised.value) == str(error)


def test_a_job_without_memory_names_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job, *_: object) -> None:
        raise OUR_OWN[0]

    monkeypatch.setattr(run_job, "_run_schedule", fail)
    monkeypatch.setattr(run_job.dist, "get_rank", lambda: 5)
    with pytest.raises(RunError, match=r"^rank 5: CUDA out of memory$"):
        run_job.perform(RunSchedule(collective("ring", full_mesh(2), 1), "auto", 1), 1.0, lambda peer: None)
