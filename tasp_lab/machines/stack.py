"""Stacks: the software that runs a layer, by name: its kernels, its hosts, and the schedules that it ships.

    stack = load_stack("megatron")
    stack.kernel("h100", layer).name                    # the attention kernel on an accelerator
    stack.host("zigzag-ring-attention").call_s          # what its host takes per kernel call
    stack.shipped("ulysses", layer, 8).text             # the flags that turn a schedule on

A stack is one file, ``tasp_lab/machines/stacks/NAME.toml``, or a file of yours. What is not known is marked: a source
that begins with ``assum`` marks an assumption. A schedule has a host model of its own, since a ring that PyTorch issues
step by step costs the host more than one all-to-all; a stack may take that of another one (``host = "megatron/ring"``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from string import Formatter
from typing import Any

import msgspec

from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import ProfileError, TaspLabError, first_line, unknown
from tasp_lab.core.lazy import from_above
from tasp_lab.core.records import Count, Record, Text, as_text, converted, data_names, load_named
from tasp_lab.core.units import parse_time_s
from tasp_lab.machines.host import INSTANT_HOST, NO_PASSES, Batches, Communicators, HostModel, Passes
from tasp_lab.machines.kernel_model import AttentionKernel, attention_kernel, gpu_names, kernel_names
from tasp_lab.machines.kernel_model.catalogue import gpu_alias, kernel_by_shape
from tasp_lab.machines.kernel_model.constants import KernelFile, Passing
from tasp_lab.machines.kernel_model.designs import architecture
from tasp_lab.machines.parameters import Stated
from tasp_lab.workload.layer import Workload

DEFAULT_STACK = "torch"
"""The stack whose kernels run where none is named."""

DECODE_STACK = "vllm"
"""That of decode layers, which PyTorch alone has no kernels for."""

OWN_STACK = "tasp-lab"
"""The stack that runs every schedule."""

TYPICAL = Workload(8192, mask="causal")
"""The layer, causal with heads of 128, where a kernel is asked for without one."""

_PASSES: tuple[Passing, Passing] = ("forward", "backward")


class KernelRule(Record, frozen=True, forbid_unknown_fields=True):
    """Which attention kernel runs; of several rules that hold, the first one with a kernel on the accelerator counts.

    Attributes
    ----------
    kernel : its name in `tasp_lab.machines.kernel_model`, or that of a library that takes one by shape
        (`kernel_by_shape`).
    source : where the choice stands.
    accelerators : GPUs, or their generations, such as ``hopper``; any if empty.
    passes, masks : any if empty.
    most_head_dim : the largest head dimension that it runs; no limit if None.
    head_dims : the elements per head of keys and of values that the rule is for alone; any if None.
    """

    kernel: str
    source: Text
    accelerators: tuple[str, ...] = ()
    passes: tuple[Passing, ...] = ()
    masks: tuple[str, ...] = ()
    most_head_dim: Count | None = None
    head_dims: tuple[Count, Count] | None = None

    def taken(self, gpu: str, passing: Passing, layer: Workload) -> KernelRule | None:
        """With the kernel that it takes; None where it is not for this GPU, pass and layer."""
        grouped = layer.kv_head_count < layer.heads
        kernel = kernel_by_shape(self.kernel, passing, layer.head_dim, grouped=grouped, value_dim=layer.value_dim)
        holds = (
            (not self.accelerators or gpu in self.accelerators or architecture(gpu) in self.accelerators)
            and (not self.passes or passing in self.passes)
            and (not self.masks or layer.mask in self.masks)
            and (not self.most_head_dim or max(layer.head_dim, layer.value_size) <= self.most_head_dim)
            and self.head_dims in (None, (layer.head_dim, layer.value_size))
            and kernel in kernel_names(gpu)
        )
        return msgspec.structs.replace(self, kernel=kernel) if holds else None


class Shipped(Record, frozen=True, forbid_unknown_fields=True):
    """A schedule that a stack ships.

    Attributes
    ----------
    schedules : a regular expression that matches the whole name of a schedule.
    source : where that stands.
    text : the flags or calls that turn it on; groups of the expression and {ranks} fill it. Empty for what was measured
        and is nothing to use.
    host : the host model: a table of ``hosts``, or STACK/TABLE of another one; none is known if empty.
    host_source : why a host model of another stack is assumed.
    options : fields of `tasp_lab.schedules.attention.options.AttentionOptions` as the stack runs the schedule; what is
        left out is taken as the fastest.
    masks : the masks that it is for; all if empty.
    backward, documents, window : whether it has a backward pass, takes packed documents, takes a window.
    heads_over : what KV heads must be a multiple of: a group of the expression, or ``ranks``; nothing if empty.
    query_heads_over : the same for heads, where KV heads are copied to as many ranks.
    multiple : positions must be a multiple of so many times the ranks.
    """

    schedules: str
    source: Text
    text: str = ""
    host: str = ""
    host_source: str = ""
    options: dict[str, str | int | bool] = msgspec.field(default_factory=dict)
    masks: tuple[str, ...] = ()
    backward: bool = True
    documents: bool = True
    window: bool = True
    heads_over: str = ""
    query_heads_over: str = ""
    multiple: Count = 1

    def filled(self, name: str, ranks: int) -> Shipped:
        """With its text for a schedule that it matches."""
        return msgspec.structs.replace(self, text=self.text.format(**self._groups(name, ranks)))

    def matches(self, name: str) -> bool:
        """Whether it is for schedules of this name."""
        return re.fullmatch(self.schedules, name) is not None

    def limit(self, name: str, layer: Workload, ranks: int, passes: Pass) -> str:
        """What the stack lacks to run the schedule for a layer; empty if nothing."""
        if self.masks and layer.mask not in self.masks:
            return f"with the mask {' or '.join(self.masks)} only"
        if not self.backward and passes != "forward":
            return "forward only"
        if not self.documents and layer.documents is not None:
            return "without packed documents only"
        if not self.window and layer.window is not None:
            return "without a window only"
        groups = self._groups(name, ranks)
        heads = ("KV heads", self.heads_over, layer.kv_head_count), ("heads", self.query_heads_over, layer.heads)
        for what, over, count in heads:
            if over and count % (divisor := int(groups[over])):
                return f"where {what} are a multiple of {divisor} only, got {count}"
        if layer.sequence % (self.multiple * ranks if self.multiple > 1 else 1):
            return f"for a multiple of {self.multiple * ranks} positions only, got {layer.sequence}"
        return ""

    def _groups(self, name: str, ranks: int) -> dict[str, str]:
        match = re.fullmatch(self.schedules, name)
        assert match is not None, "it matches the schedule"
        return {group: value or "" for group, value in match.groupdict().items()} | {"ranks": str(ranks)}


class HostRecord(Record, frozen=True, forbid_unknown_fields=True):
    """A host model as a file states it, see `tasp_lab.machines.host.HostModel`."""

    batches: Batches
    overlaps: bool
    call: Stated
    backward_call: Stated
    batch: Stated
    waits_for_sends: bool = False
    communicators: Communicators = "all"
    separate: tuple[Passing, ...] = ()
    passes: Passes = NO_PASSES

    def model(self, name: str, assumed: str) -> HostModel:
        """The numbers in seconds; `assumed` is why another stack is assumed to have them."""
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        stated: dict[str, Stated] = {f"{key}_s": fields.pop(key) for key in ("call", "backward_call", "batch")}
        times_s: dict[str, Any] = {key: parse_time_s(each.value) for key, each in stated.items()}
        before = f"{assumed}; " if assumed else ""
        sources = tuple((key, before + each.source) for key, each in stated.items())
        return HostModel(name, **times_s, **fields, sources=sources)


class StepSoftware(Record, frozen=True, forbid_unknown_fields=True):
    """How software runs a training step where others differ; the default is compiled PyTorch with FSDP.

    Attributes
    ----------
    source : where that stands.
    fused : whether element-wise work is fused; else each operation is a kernel, as in eager PyTorch.
    overlaps : whether, without flags, parameters are gathered and gradients reduced beside layers.
    loss_bytes : what the loss moves per logit, forward and backward. Default: a cast to float32 (2 read, 4 written) and
        the logarithm of the softmax (4, 4); its gradient (4 written), that of the logits (8 read, 4 written), and a
        cast (4, 2) of PyTorch's cross entropy.
    logit_bytes : per logit. Default: when the backward pass of PyTorch's cross entropy ends, the logarithm of the
        softmax, its gradient and that of the logit, each in float32. The logit itself in 16 bits was dropped
        (torchtitan 9dec370, train.py).
    dummy_gradients : whether a 16-bit tensor of the shape of each matrix of a layer, and of the output, stays allocated
        and is given to autograd for a gradient that was added to the float32 one.
    offloads_shards : whether, with FSDP, offload moves shards of parameters and gradients to the host, too.
    """

    source: str = ""
    fused: bool = True
    overlaps: bool = True
    loss_bytes: tuple[Count, Count] = (14, 22)
    logit_bytes: Count = 12
    dummy_gradients: bool = False
    offloads_shards: bool = False


COMPILED = StepSoftware()


class Stack(Record, frozen=True, forbid_unknown_fields=True):
    """Software that runs layers.

    Attributes
    ----------
    summary : what it is, in a line.
    library : its name for people.
    version : what was read, with its date.
    source : where.
    communication : the communication library and its version, if the stack fixes one.
    memory : what it does to save memory, with the source; predictions leave it out.
    kernels : which attention kernel runs.
    kernels_as : the stack whose kernels run instead.
    schedules : those that it ships; the first entry that matches a name counts.
    hosts : host models by name.
    step : how it runs a training step where others differ.
    name : of the file.
    """

    summary: Text
    library: Text
    version: Text
    source: Text
    kernels: tuple[KernelRule, ...] = ()
    kernels_as: str = ""
    schedules: tuple[Shipped, ...] = ()
    hosts: dict[str, HostRecord] = msgspec.field(default_factory=dict)
    communication: str = ""
    memory: str = ""
    step: StepSoftware = COMPILED
    name: str = ""

    def shipped(self, schedule: str, layer: Workload, ranks: int, passes: Pass = "forward") -> Shipped | None:
        """How the stack runs a schedule for a layer; None where it does not."""
        found = self._entry(schedule)
        return None if self.refusal(schedule, layer, ranks, passes) or not found else found.filled(schedule, ranks)

    def refusal(self, schedule: str, layer: Workload, ranks: int, passes: Pass) -> str:
        """Why it does not run a schedule for a layer, on one line; empty if it does."""
        found = self._entry(schedule)
        if found is None:
            return f"the stack {self.name} does not ship {schedule}"
        limit = found.limit(schedule, layer, ranks, passes)
        return f"the stack {self.name} runs {schedule} {limit}" if limit else ""

    def host(self, schedule: str) -> HostModel:
        """The host model of a schedule; that of a host that takes no time where none is known."""
        found = self._entry(schedule)
        if found is None or not found.host:
            return INSTANT_HOST
        stack, _, name = found.host.rpartition("/")
        record = (load_stack(stack) if stack else self).hosts[name]
        return record.model(f"{stack or self.name}/{name}", found.host_source)

    def options(self, schedule: str) -> Mapping[str, str | int | bool]:
        """The options with which it runs a schedule."""
        found = self._entry(schedule)
        return {} if found is None else found.options

    def kernel(self, accelerator: str, layer: Workload = TYPICAL) -> AttentionKernel | None:
        """The attention kernel on an accelerator; None if no rule has one there.

        Passes with different kernels have the constants of each, under both names.
        """
        gpu, rules = gpu_alias(accelerator), self.rules(accelerator, layer)
        if not rules:
            return None
        kernels = [attention_kernel(gpu, rule.kernel) for rule in rules]
        forward, backward = kernels
        if forward == backward:
            return forward
        by_pass = zip(kernels, _PASSES, strict=True)
        variants = tuple(
            each for kernel, passing in by_pass for each in kernel.file.variants if each.passing == passing
        )
        notes = "; ".join(dict.fromkeys(kernel.note for kernel in kernels if kernel.note))
        return AttentionKernel(forward.gpu, KernelFile(gpu, f"{forward.name} and {backward.name}", variants), notes)

    def rules(self, accelerator: str, layer: Workload = TYPICAL) -> tuple[KernelRule, ...]:
        """The rules of both passes by which its kernels follow; none where a pass has no kernel."""
        if self.kernels_as:
            return load_stack(self.kernels_as).rules(accelerator, layer)
        gpu = gpu_alias(accelerator)
        if gpu not in gpu_names():
            return ()
        # the first rule that holds, as its file lists exceptions before the rest
        takes = ((rule.taken(gpu, passing, layer) for rule in self.kernels) for passing in _PASSES)
        found = [rule for each in takes if (rule := next(filter(None, each), None))]
        return tuple(found) if len(found) == len(_PASSES) else ()

    def _entry(self, schedule: str) -> Shipped | None:
        return next((each for each in self.schedules if each.matches(schedule)), None)


def stack_names() -> list[str]:
    """The stacks of tasp-lab, in alphabetical order.

    >>> "megatron" in stack_names()
    True
    """
    return data_names("tasp_lab.machines", "stacks")


def load_stack(name: str) -> Stack:
    """A stack by name, or from a file whose name ends in ``.toml``. Raises `ProfileError` for an unknown or wrong one.

    >>> load_stack("yunchang").library
    'yunchang'
    """
    return load_named("stack", "tasp_lab.machines", "stacks", name, _read)


def _read(name: str, content: bytes) -> Stack:
    """The stack of a file. Raises `ProfileError`."""
    try:
        found = msgspec.structs.replace(converted(tomllib.loads(as_text(content)), Stack), name=name)
        _check(found)
    except (TaspLabError, msgspec.ValidationError, ValueError, re.error) as error:
        raise ProfileError(f"{name}: no stack: {first_line(error)}") from error
    return found


@cache
def _known_to_rules() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The accelerators and architectures that rules may name, and the kernels."""
    gpus = gpu_names()
    kernels = {kernel for gpu in gpus for kernel in kernel_names(gpu)}
    return (*gpus, *dict.fromkeys(map(architecture, gpus))), tuple(sorted(kernels))


def _check(found: Stack) -> None:
    """Raise a `TaspLabError` for names that nothing has, and for quantities that are none."""

    def known(what: str, name: str, names: Collection[str]) -> None:
        if name not in names:
            raise ProfileError(unknown(what, name, list(names)))

    places, kernels = _known_to_rules()
    for rule in found.kernels:
        known("kernel", kernel_by_shape(rule.kernel), kernels)
        for accelerator in rule.accelerators:
            known("accelerator", accelerator, places)
    if found.kernels_as:
        load_stack(found.kernels_as)
    for name, host in found.hosts.items():
        host.model(name, "")
    for how in found.schedules:
        from_above("check options")(how.options)  # their values are checked where a schedule is built with them
        groups = [*re.compile(how.schedules).groupindex, "ranks"]
        fields = [field for _, field, _, _ in Formatter().parse(how.text) if field is not None]
        for group in (*fields, *filter(None, (how.heads_over, how.query_heads_over))):
            known("group", group, groups)
        if how.host:
            stack, _, name = how.host.rpartition("/")
            known("host", name, load_stack(stack).hosts if stack else found.hosts)


def stack_of(name: str, layer: Workload) -> Stack:
    """The stack of this name; without a name the one whose kernels run for a layer. Raises `ProfileError`."""
    return load_stack(name or (DECODE_STACK if layer.decode else DEFAULT_STACK))


def kernels_run(accelerator: str, layer: Workload) -> list[str]:
    """The kernels that any stack runs on an accelerator.

    >>> kernels_run("A100", Workload(8192))
    ['flash-attention-2', 'flash-attention-4']
    """
    rules = (rule for name in stack_names() for rule in load_stack(name).rules(accelerator, layer))
    return list(dict.fromkeys(rule.kernel for rule in rules))


def shipping(
    schedule: str,
    layer: Workload,
    ranks: int,
    passes: Pass = "forward",
    accelerator: str = "",
    groups: str = "auto",
) -> Iterator[tuple[Stack, Shipped]]:
    """The stacks that ship a schedule for a layer, and how each turns it on; not tasp-lab itself, which has them all.

    Of an accelerator whose kernels are known, those that have one there. One with other groups of ranks sends other
    messages, and does not count.

    >>> layer = Workload(8192, mask="causal")
    >>> [stack.name for stack, _ in shipping("direct-attention", layer, 8)]
    ['magi']
    """
    any_runs = gpu_alias(accelerator) not in gpu_names()
    for name in stack_names():
        stack = load_stack(name)
        found = None if name == OWN_STACK else stack.shipped(schedule, layer, ranks, passes)
        same = found is not None and groups in ("auto", found.options.get("groups", groups))
        if found is not None and found.text and same and (any_runs or stack.kernel(accelerator, layer) is not None):
            yield stack, found
