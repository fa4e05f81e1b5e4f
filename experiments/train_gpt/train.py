"""The training loop: each rank processes its shard of its group's sequences; gradients are summed over all ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from experiments.train_gpt.attention import TimedAttention
from experiments.train_gpt.model import GPT
from experiments.train_gpt.options import Recipe, RunOptions
from experiments.train_gpt.start import State, agree, check_agreement, save
from runtime.executor.messages import LostPeer, call_peers
from runtime.executor.transports import default_device
from runtime.sequence_parallel.agreement import Proposal
from runtime.sequence_parallel.sharding import positions, shard
from tasp_lab.core.errors import RunError, TaspLabError


class Batches:
    """Batches drawn from a text, the same on every rank.

    >>> Batches(b"one two three", seed=0).draw(2, 4).shape
    torch.Size([2, 5])
    """

    def __init__(self, text: bytes, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def draw(self, sequences: int, length: int) -> torch.Tensor:
        """Tokens, int64 [sequences, length + 1]: inputs are all but the last, targets all but the first.

        The text must be longer than `length`.
        """
        first = torch.randint(len(self._text) - length, (sequences, 1), generator=self.random)
        return self._text[first + torch.arange(length + 1)].long()


class LostRankError(RunError):
    """A rank was lost during training, as reported by one rank."""


class Gradients:
    """The gradients of a model and its loss in one tensor, summed over all ranks by a single all_reduce.

    DistributedDataParallel would divide by the number of ranks, and its communication would overlap that of attention
    in the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        self._all = torch.zeros(sum(sizes) + 1, device=parameters[0].device)
        for parameter, part in zip(parameters, torch.split(self._all[:-1], sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def clear(self) -> None:
        self._all.zero_()

    def sum_over_ranks(self, loss: torch.Tensor) -> float:
        """Sum the gradients and the loss over all ranks; returns the loss. Raises `LostRankError`."""
        self._all[-1] = loss.detach()
        try:
            call_peers(self._all.is_cuda, dist.all_reduce, self._all)
        except LostPeer as error:
            lost = f"rank {dist.get_rank()}: lost a rank while gradients were summed ({error})"
            raise LostRankError(lost) from None
        return float(self._all[-1])


@dataclass(frozen=True)
class Step:
    """One step: its loss, the mean over all tokens in nats, and the times of this rank.

    That of attention includes that of re-layouts.
    """

    number: int
    loss: float
    step_s: float
    attention_s: float
    relayout_s: float
    gradient_sum_s: float


class Trainer:
    """One rank of a run. Construction and `step` are collectives; raises `TaspLabError` if a rank cannot start."""

    def __init__(self, recipe: Recipe, run: RunOptions) -> None:
        self._recipe, self._run = recipe, run
        self._device = torch.device(default_device())
        self._start = agree(recipe, run)
        self._batches = Batches(self._start.text, recipe.seed)
        shape = run.shape(recipe, dist.get_world_size())
        self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("data", "sequence"))
        self._layouts, self._rank = run.layouts(recipe, self._mesh.size(1)), self._mesh.get_local_rank("sequence")
        schedules = {"S": run.schedule, "L": run.linear_schedule}
        self._attend = TimedAttention(schedules, self._layouts, self._mesh.get_group("sequence"))
        torch.manual_seed(recipe.seed)
        self.model = GPT(recipe, self._attend, run.checkpoint_activations).to(self._device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), recipe.learning_rate, betas=(0.9, 0.95))
        self._gradients = Gradients(self.model)
        self.done = 0
        if self._start.state is not None:
            self._restore(self._start.state)

    def step(self) -> Step:
        """Make one step. Raises `LostRankError` that names the lost rank if known."""
        began_s, attention_s, relayout_s = time.perf_counter(), self._attend.seconds, self._attend.relayout_seconds
        tokens, targets = self._draw()
        self._gradients.clear()
        with self._locating_lost_ranks():
            loss = self._loss(tokens, targets)
            loss.backward()  # type: ignore[no-untyped-call]
        computed_s = time.perf_counter()
        total = self._gradients.sum_over_ranks(loss)
        gradient_sum_s = time.perf_counter() - computed_s
        if not math.isfinite(total):
            raise RunError(f"step {self.done + 1}: the loss is {total}")
        self._optimizer.step()
        self.done += 1
        step_s = time.perf_counter() - began_s
        attention_s, relayout_s = self._attend.seconds - attention_s, self._attend.relayout_seconds - relayout_s
        return Step(self.done, total, step_s, attention_s, relayout_s, gradient_sum_s)

    def save(self) -> None:
        """Write the checkpoint on rank 0 and wait until it is complete. Raises `TaspLabError` on all ranks."""
        own: Proposal | TaspLabError = {}
        try:
            if self._run.save is not None and dist.get_rank() == 0:
                save(self._run.save, self._state())
        except TaspLabError as error:
            own = error
        check_agreement(own)

    def _state(self) -> State:
        return {
            "decisive": self._start.decisive,
            "step": self.done,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": self._batches.random.get_state(),
        }

    def _draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of this rank, [batch of its group, positions of its shard] each.

        Tokens are in the layout of the first layer, targets in that of the last one. All ranks draw the whole batch.
        The target of a token is the next token, which may be in another shard, so tokens are shifted before sharding.
        """
        batch = self._batches.draw(self._recipe.batch, self._recipe.seq)
        mine = batch.chunk(self._mesh.size(0))[self._mesh.get_local_rank("data")].to(self._device)
        first, last = (self._layouts[self._recipe.layers[end]] for end in (0, -1))
        return shard(mine[:, :-1], first, self._rank), shard(mine[:, 1:], last, self._rank)

    def _loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The contribution of this rank's positions to the mean over all tokens of the step."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.dtype == "bf16"):
            at = {kind: positions(each, self._rank, self._device) for kind, each in self._layouts.items()}
            logits = self.model(tokens, at)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / self._recipe.tokens

    def _restore(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._batches.random.set_state(state["random"])
        self.done = state["step"]

    @contextlib.contextmanager
    def _locating_lost_ranks(self) -> Iterator[None]:
        """Convert `RunError` of attention to `LostRankError` with the training step and the ranks of the group."""
        try:
            yield
        except RunError as error:
            ranks = dist.get_process_group_ranks(self._mesh.get_group("sequence"))
            among = "" if self._mesh.size(0) == 1 else f" among ranks {ranks}"
            raise LostRankError(f"training step {self.done + 1}, attention{among}: {error}") from None


def train(recipe: Recipe, run: RunOptions, progress: Callable[[Step], None] = lambda _: None) -> list[Step]:
    """Train as one rank of the current process group; returns the steps, and passes each to `progress` when done."""
    trainer = Trainer(recipe, run)
    steps = []
    while trainer.done < run.steps:
        steps.append(trainer.step())
        progress(steps[-1])
        if run.save is not None and (trainer.done % run.save_every == 0 or trainer.done == run.steps):
            trainer.save()
    return steps
