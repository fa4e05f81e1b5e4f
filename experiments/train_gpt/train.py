"""Training: every rank computes its positions of its group's sequences, and gradients are summed over all ranks."""

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
from experiments.train_gpt.checkpoint import State, save
from experiments.train_gpt.data import Batches
from experiments.train_gpt.gradients import Gradients, LostRankError
from experiments.train_gpt.model import GPT
from experiments.train_gpt.options import Recipe, Way
from experiments.train_gpt.start import agree, together
from runtime.agreement import Proposal
from runtime.sharding import positions, shard
from runtime.transport import device
from tasp_lab.attention import attention_placement
from tasp_lab.errors import RunError, TaspLabError


@dataclass(frozen=True)
class Step:
    """One step: its loss, the mean over all tokens in nats, and this rank's times."""

    number: int
    loss: float
    step_s: float
    attention_s: float
    gradient_sum_s: float


class Trainer:
    """One rank's part of a run; made and stepped by all ranks. Raises `TaspLabError` where they cannot start."""

    def __init__(self, recipe: Recipe, way: Way) -> None:
        self._recipe, self._way = recipe, way
        self._device = torch.device(device())
        self._start = agree(recipe, way)
        self._batches = Batches(self._start.text, recipe.seed)
        shape = way.shape(recipe, dist.get_world_size())
        self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("data", "sequence"))
        placement = attention_placement(way.schedule, recipe.attention(1), self._mesh.size(1))
        self._placement, self._rank = placement, self._mesh.get_local_rank("sequence")
        self._attend = TimedAttention(way.schedule, self._mesh.get_group("sequence"))
        torch.manual_seed(recipe.seed)
        self.model = GPT(recipe, self._attend, way.checkpoint_activations).to(self._device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), recipe.learning_rate, betas=(0.9, 0.95))
        self._gradients = Gradients(self.model)
        self.done = 0
        if self._start.state is not None:
            self._restore(self._start.state)

    def step(self) -> Step:
        """Make one step. Raises `LostRankError` that names the rank where that is known."""
        began_s, attention_s = time.perf_counter(), self._attend.seconds
        tokens, targets = self._draw()
        self._gradients.clear()
        with self._where_ranks_are_lost():
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
        return Step(self.done, total, step_s, self._attend.seconds - attention_s, gradient_sum_s)

    def save(self) -> None:
        """Have rank 0 write the checkpoint; when this returns it is there. Raises `TaspLabError` on all ranks."""
        own: Proposal | TaspLabError = {}
        try:
            if self._way.save is not None and dist.get_rank() == 0:
                save(self._way.save, self._state())
        except TaspLabError as error:
            own = error
        together(own)

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

        All ranks draw the whole batch. A target is the token after, which may lie in another shard: so first shift,
        then shard.
        """
        batch = self._batches.draw(self._recipe.batch, self._recipe.seq)
        mine = batch.chunk(self._mesh.size(0))[self._mesh.get_local_rank("data")].to(self._device)
        return shard(mine[:, :-1], self._placement, self._rank), shard(mine[:, 1:], self._placement, self._rank)

    def _loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What this rank's positions add to the mean over all tokens of the step."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.dtype == "bf16"):
            logits = self.model(tokens, positions(self._placement, self._rank, self._device))
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / self._recipe.tokens

    def _restore(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._batches.random.set_state(state["random"])
        self.done = state["step"]

    @contextlib.contextmanager
    def _where_ranks_are_lost(self) -> Iterator[None]:
        """`RunError` of attention, which counts ranks and steps for itself, with where in the run that was."""
        try:
            yield
        except RunError as error:
            ranks = dist.get_process_group_ranks(self._mesh.get_group("sequence"))
            among = "" if self._mesh.size(0) == 1 else f" among ranks {ranks}"
            raise LostRankError(f"training step {self.done + 1}, attention{among}: {error}") from None


def train(recipe: Recipe, way: Way, say: Callable[[Step], None] = lambda _: None) -> list[Step]:
    """Train as one rank of the process group that is there; the steps, and each to `say` when it is done."""
    trainer = Trainer(recipe, way)
    steps = []
    while trainer.done < way.steps:
        steps.append(trainer.step())
        say(steps[-1])
        if way.save is not None and (trainer.done % way.save_every == 0 or trainer.done == way.steps):
            trainer.save()
    return steps
