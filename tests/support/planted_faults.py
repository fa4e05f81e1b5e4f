"""Faults planted in the product, one at a time, and the tests that must find them.

    python -m tests.support.planted_faults              # all faults, each with its own tests, in a copy of the tree
    python -m tests.support.planted_faults proof lanes  # those whose names contain one of the words

Each fault is a change of one line, written as the text before and after. The text before must occur exactly once in
the product, in whatever file, so that files may move; if it does not, the list is out of date and the script says so.
A fault is found if the tests named beside it fail. A fault that passes is a hole in the suite: the script ends with 1.

The faults are of the kind that a reader overlooks: a bound that is off by one, a term left out, the wrong one of two
similar columns. They span the product: topologies, rings, proof, engines, machines, predictions, studies, runtime.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT = ("tasp_lab", "sim", "runtime")
COPIED = (*PRODUCT, "tests", "experiments", "docs", "notebooks", "pyproject.toml", "README.md", "mkdocs.yml")


class Fault(NamedTuple):
    """A fault.

    Parameters
    ----------
    name : what is wrong then.
    before, after : the text that is changed, which occurs once in the product, and what it becomes.
    tests : files or folders of tests that find it, the cheapest first.
    """

    name: str
    before: str
    after: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "checks: rows of all collectives err alike",
        "* np.exp(-abs(place[:, None] - place)) * same",
        "* np.exp(-abs(place[:, None] - place))",
        ("tests/measure/test_check.py",),
    ),
    Fault(
        "checks: a cause may be as severe as any other of its effect",
        "return severity is None or self.range is None or self.range[0] <= severity <= self.range[1]",
        "return True",
        ("tests/measure/test_check.py",),
    ),
    Fault(
        "checks: what begins at large messages slows all",
        "felt & (sizes >= least)",
        "felt & (sizes >= 0 * least)",
        ("tests/measure/test_check.py",),
    ),
    Fault(
        "routes: half around a ring everyone goes up",
        "rises = (up < down) | ((up == down) & ~(spread & (here[at] % 2 == 1)))",
        "rises = up <= down",
        ("tests/topology/test_forwarding.py", "tests/sim/test_bisection.py"),
    ),
    Fault(
        "routes: one rank fewer forwards than may",
        "self._distances(sources[far], destinations[far]) <= most + 1",
        "self._distances(sources[far], destinations[far]) <= most",
        ("tests/topology/test_forwarding.py",),
    ),
    Fault(
        "max-min: a frozen flow leaves its share to others",
        "left[constraint] -= level",
        "left[constraint] -= 0 * level",
        ("tests/sim/test_max_min.py",),
    ),
    Fault(
        "event engine: a message has no latency of its own",
        "self.latency_s: Number = route.latency_s + message.latency_s",
        "self.latency_s: Number = route.latency_s",
        ("tests/sim/test_laws.py", "tests/sim"),
    ),
    Fault(
        "event engine: contention does not slow a call in progress",
        "self.left_s -= (1 - share) * elapsed_s",
        "self.left_s -= elapsed_s",
        ("tests/sim/test_contention.py",),
    ),
    Fault(
        "array engine: sends and receives of a GPU add up",
        "min(max(gpu.sending, gpu.receiving), gpus.max_channels)",
        "min(gpu.sending + gpu.receiving, gpus.max_channels)",
        ("tests/sim/test_laws.py", "tests/sim"),
    ),
    Fault(
        "event engine: the host serves the last lane first",
        "heapq.heappush(self._queue, (self._env.now, lane, launch_s, done))",
        "heapq.heappush(self._queue, (self._env.now, -lane, launch_s, done))",
        ("tests/sim/test_laws.py", "tests/sim"),
    ),
    Fault(
        "array engine: a class of transfers passes a link once, whatever its members",
        'passes["count"] = np.bincount(classes.of_operation)[passing] * passed // size[constraint]',
        'passes["count"] = passed',
        ("tests/sim/test_laws.py", "tests/sim"),
    ),
    Fault(
        "dependencies: the first buffer is never waited for",
        "takes = taken >= 0",
        "takes = taken > 0",
        ("tests/schedule", "tests/sim"),
    ),
    Fault(
        "dependencies: all lanes of a rank are one",
        "messages.source * schedule.lanes + messages.lane",
        "messages.source * schedule.lanes",
        ("tests/schedule", "tests/sim"),
    ),
    Fault(
        "messages: blocks apart in memory go together",
        "joins &= offset[after] == offset[before] + size[before]",
        "joins &= offset[after] >= offset[before] + size[before]",
        ("tests/schedule/test_messages.py", "tests/sim/test_messages.py", "tests/runtime/test_predicted_messages.py"),
    ),
    Fault(
        "proof: a block may arrive twice in a step",
        "self._refuse(step, came.doubled >= 0, twice)",
        "_ = twice",
        ("tests/schedule",),
    ),
    Fault(
        "proof: calls may add to what is sent at the same step",
        "wrong[wrong] = self._schedule.is_resident(added.rank[wrong], added.block[wrong])",
        "wrong[:] = False",
        ("tests/schedule",),
    ),
    Fault(
        "proof: copies may be left behind",
        "wrong = held & ~stays",
        "wrong = held & False",
        ("tests/schedule",),
    ),
    Fault(
        "collectives: an AllReduce may begin with the same part everywhere",
        "parts = np.sort(np.broadcast_to(schedule.initial_part, (n, *columns)), axis=0)",
        "parts = np.arange(n)[:, None] + 0 * np.broadcast_to(schedule.initial_part, (n, *columns))",
        ("tests/schedules/collectives", "tests/schedule"),
    ),
    Fault(
        "layout: zigzag gives a rank two neighbouring chunks",
        "for at in (rank, -1 - rank)",
        "for at in (2 * rank, 2 * rank + 1)",
        ("tests/workload", "tests/schedules"),
    ),
    Fault(
        "layout: stripes of what follows a prefix begin at the first rank, whoever has a remainder",
        "key=lambda rank: rank not in longer",
        "key=lambda rank: rank",
        ("tests/workload", "tests/schedules"),
    ),
    Fault(
        "layer: keys have as many heads as queries",
        "return self.batch * self.kv_head_count * (self.head_dim + values) * ELEMENT_BYTES[self.dtype]",
        "return self.batch * self.heads * (self.head_dim + values) * ELEMENT_BYTES[self.dtype]",
        ("tests/workload", "tests/schedules"),
    ),
    Fault(
        "TokenRing: the last results never return",
        "ends = [max(each.arrivals.last + 2, each.gifts.last + 1, each.calls.last + 1) for each in self.travels]",
        "ends = [max(each.arrivals.last + 2, each.gifts.last, each.calls.last + 1) for each in self.travels]",
        ("tests/schedules/attention/test_token_ring.py", "tests/schedules"),
    ),
    Fault(
        "travel: what passes a rank that needs none of it does not come there",
        "there[self.route.via[row, hop], block] = True",
        "there[self.route.via[row, hop], block] |= self.used[hop, block]",
        ("tests/schedules/attention/test_forward.py", "tests/schedules"),
    ),
    Fault(
        "travel: a sum does not go on to the hop where its last part is added",
        "(self.complete >= first[row].T)",
        "(self.complete > first[row].T)",
        ("tests/schedules/attention/test_backward.py", "tests/schedules"),
    ),
    Fault(
        "rings: the Gray code is no Gray code",
        "order = ranks ^ ranks >> 1",
        "order = ranks ^ ranks >> 2",
        ("tests/rings",),
    ),
    Fault(
        "rings: nodes of five ranks use each pair once",
        "least_fold = 2 if per_node in (3, 5) else 1",
        "least_fold = 2 if per_node == 3 else 1",
        ("tests/rings",),
    ),
    Fault(
        "bound: the first part of a block is the whole block",
        "(part < 0) | (schedule.blocks.parts == 1)",
        "(part < 1) | (schedule.blocks.parts == 1)",
        ("tests/schedule/test_reductions_at_work.py",),
    ),
    Fault(
        "bound: covers add up the wrong rows",
        "beyond = row_bytes.sum() - row_bytes.cumsum()",
        "beyond = row_bytes.cumsum()",
        ("tests/schedules/attention/test_bound.py",),
    ),
    Fault(
        "NCCL: channels double one size too early",
        "while 2 * channels <= self.most and size_bytes > channels * bytes_per_channel:",
        "while 2 * channels <= self.most and size_bytes >= channels * bytes_per_channel:",
        ("tests/machines/test_channels.py",),
    ),
    Fault(
        "NCCL: peers that just fit get half the channels",
        "while most > 1 and most * groups > channels:",
        "while most > 1 and most * groups >= channels:",
        ("tests/machines/test_channels.py",),
    ),
    Fault(
        "NCCL: the protocol is chosen without its base latency",
        'latency_s = _BASE_US["ring"][number] * _US + (steps - between) * inside_s',
        "latency_s = (steps - between) * inside_s",
        ("tests/machines/test_channels.py",),
    ),
    Fault(
        "contention: messages take more channels than there are",
        "return min(max(sending, receiving), self.max_channels) * self.sms_per_channel / self.sms",
        "return max(sending, receiving) * self.sms_per_channel / self.sms",
        ("tests/machines/test_contention.py", "tests/sim/test_contention.py"),
    ),
    Fault(
        "importer: links back are not counted",
        "if counts[b, a] != count:",
        "if not count:",
        ("tests/machines/test_importers.py",),
    ),
    Fault(
        "nccl-tests: wrong results are taken",
        'if column == "#wrong" and not "N/A".startswith(words[3])',
        'if column == "#nothing" and not "N/A".startswith(words[3])',
        ("tests/measure/readers/test_measurements.py",),
    ),
    Fault(
        "fit: held-out rows do not count",
        "worst = max(self.after, self.held_out)",
        "worst = self.after",
        ("tests/measure/fit/test_acceptance.py",),
    ),
    Fault(
        "tuning: the options with most changes win a tie",
        "sum(getattr(way, name) != getattr(asked, name) for name in free)",
        "-sum(getattr(way, name) != getattr(asked, name) for name in free)",
        ("tests/prediction/test_tune.py", "tests/prediction"),
    ),
    Fault(
        "memory of a step: sharded states are rounded down",
        "return -(-size // ranks)",
        "return size // ranks",
        ("tests/prediction/training_step",),
    ),
    Fault(
        "study: the machine's constants are no part of a key",
        "sha256([self.inputs(), constants_of(self) if constants is None else constants, models])",
        "sha256([self.inputs(), models])",
        ("tests/study/test_keys.py", "tests/study"),
    ),
    Fault(
        "crossover: a bisection stops a value too early",
        "while high - low > 1 and values[high] > values[low] * (1 + tolerance):",
        "while high - low > 2 and values[high] > values[low] * (1 + tolerance):",
        ("tests/study",),
    ),
    Fault(
        "merge: parts without keys replace others",
        "weight.masked_fill_(nothing, 1)",
        "weight.masked_fill_(nothing, 0)",
        ("tests/runtime/test_kernels.py", "tests/runtime"),
    ),
    Fault(
        "bands: a trimmed band keeps its old lower limit",
        "max(low - shift, 1 - keys), min(high - shift, queries - 1)",
        "max(low, 1 - keys), min(high - shift, queries - 1)",
        ("tests/runtime/test_kernels.py", "runtime/kernels"),
    ),
    Fault(
        "windows: no limit beside another one is as many keys, of whatever queries",
        "most if right < 0 else right",
        "band.keys if right < 0 else right",
        ("tests/runtime/test_kernels.py",),
    ),
    Fault(
        "packed calls: only the first round of segments that share queries is merged",
        "for each in call.rounds:",
        "for each in [call]:",
        ("tests/runtime/test_packed_kernels.py",),
    ),
    Fault(
        "windows: a query sees one key less after its own position",
        "low=self.low if after is None else -after",
        "low=self.low if after is None else 1 - after",
        ("tests/workload/test_workload.py",),
    ),
    Fault(
        "ranges: a causal one begins at the first query and key",
        'low = end - end_key if self.kind in ("causal", "bi-causal")',
        'low = first - first_key if self.kind in ("causal", "bi-causal")',
        ("tests/workload/test_ranges.py",),
    ),
    Fault(
        "ranges: pairs of a run with a stride are those of one without",
        "begin, stop = (np.clip(-((start - limit) // stride), 0, count) for limit in (first, end))",
        "begin, stop = (np.clip(limit - start, 0, count) for limit in (first, end))",
        ("tests/workload/test_ranges.py",),
    ),
    Fault(
        "ranges: chunks go to ranks in turn, whatever their pairs",
        "total[rank] += int(pairs[chunk])",
        "total[rank] += 1",
        ("tests/workload/test_ranges.py",),
    ),
    Fault(
        "ranges: a rank needs a key less than its last query sees",
        "np.minimum(last - low + 1, end_key)",
        "np.minimum(last - low, end_key)",
        ("tests/schedules/attention/test_direct_attention.py",),
    ),
    Fault(
        "ranges: keys that no query attends to have no gradients",
        "return seen[number[queries], number[keys]] | by_owner",
        "return seen[number[queries], number[keys]]",
        ("tests/schedules/test_laws.py",),
    ),
    Fault(
        "sinks: their gradient has the inverse weight",
        "torch.exp(sinks - lse.transpose(1, 2))",
        "torch.exp(lse.transpose(1, 2) - sinks)",
        ("tests/runtime/test_all_outputs.py",),
    ),
    Fault(
        "hosts: sums wait for a call that needs their memory",
        "np.maximum.at(latest, edges.after[freed], latest[edges.before[freed]])",
        "np.maximum.at(latest, edges.after[freed], -2)",
        ("tests/sim/test_laws.py", "tests/sim/test_serial_messages.py"),
    ),
    Fault(
        "executor: a sum that was sent away is still there",
        "self._has_parts.difference_update(blocks)",
        "_ = blocks",
        ("tests/schedule/test_reductions_at_work.py", "tests/runtime/test_executor.py"),
    ),
    Fault(
        "executor: operands that lie apart are taken in reverse",
        "return tuple(torch.cat(list(fields)) for fields in zip(*found, strict=True))",
        "return tuple(torch.cat(list(fields)[::-1]) for fields in zip(*found, strict=True))",
        ("tests/runtime/test_what_is_proven_runs.py",),
    ),
    Fault(
        "rank program: a join does not wait for earlier readers",
        "if step <= join.step:",
        "if step < join.step:",
        ("tests/runtime", "tests/schedule"),
    ),
    Fault(
        "watchdog: a rank that computes for ever is never found",
        "if last.row[2] == WORKING and now - last.progress_at_s > self._longest_silence_s:",
        "if last.row[2] == WORKING and now - last.beat_at_s > self._longest_silence_s:",
        ("tests/runtime/test_heartbeat.py",),
    ),
    Fault(
        "units: a rate of zero is taken",
        'raise QuantityError(f"{what} {text!r}: expected more than 0 {unit}")',
        "return 0.0",
        ("tests/core/test_units.py",),
    ),
    Fault(
        "layer: one cached position more than there are",
        "if not 0 <= self.cached_keys < self.sequence + self.decode:",
        "if not 0 <= self.cached_keys <= self.sequence + self.decode:",
        ("tests/workload/test_workload.py",),
    ),
    Fault(
        "decode: results are scaled by the inverse of their share",
        "(lse - keys[0].logsumexp(1, keepdim=True)).exp()[..., None]",
        "(keys[0].logsumexp(1, keepdim=True) - lse).exp()[..., None]",
        ("tests/runtime/test_decode.py",),
    ),
    Fault(
        "decode: a rank of a tree is left out",
        "for far in (1 << level for level in range((n - 1).bit_length())):",
        "for far in (1 << level for level in range(n.bit_length() - 1)):",
        ("tests/schedules/attention/test_decode.py",),
    ),
    Fault(
        "decode: values in keys are read twice",
        "values = 0.0 if shape.values_in_keys else columns * size",
        "values = columns * size",
        ("tests/schedules/attention/test_decode.py",),
    ),
    Fault(
        "decode: heads of a KV head do not share a tile",
        "tiles = shape.batch * shape.kv_heads * math.ceil(shape.heads // shape.kv_heads / DECODE_ROWS)",
        "tiles = shape.batch * shape.heads",
        ("tests/schedules/attention/test_decode.py",),
    ),
)


def main(words: list[str]) -> int:
    """Plant the chosen faults one after another; the number of those that no test finds, at most 1 as a status."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:  # one copy for all faults: the simulator is compiled once
        copy = Path(folder)
        _copy_tree(copy)
        missed = [fault.name for fault in chosen if not _is_found(fault, copy)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found", *missed, sep="\n  ")
    return int(bool(missed))


def place_of(fault: Fault, root: Path = ROOT) -> Path:
    """The file that has the text of a fault. Raises `LookupError` unless it occurs exactly once in the product."""
    files = [path for package in PRODUCT for path in sorted((root / package).rglob("*.py"))]
    places = [path for path in files for _ in range(path.read_text().count(fault.before))]
    if len(places) != 1:
        raise LookupError(f"fault {fault.name!r}: its text occurs {len(places)} times, expected once: {fault.before}")
    return places[0]


def _copy_tree(copy: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, copy / name)


def _is_found(fault: Fault, copy: Path) -> bool:
    """Whether the tests of a fault fail in a copy of the tree that has it; the copy is as before afterwards."""
    place = place_of(fault, copy)
    sound = place.read_text()
    place.write_text(sound.replace(fault.before, fault.after))
    try:
        for tests in fault.tests:
            line = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu and not alone", tests]
            tested = subprocess.run(
                line, cwd=copy, env=_environment(copy), capture_output=True, text=True, check=False, timeout=3600
            )
            if tested.returncode == 1:
                failed = next((row for row in tested.stdout.splitlines() if row.startswith("FAILED")), "")
                print(f"found: {fault.name}: {failed.removeprefix('FAILED ').partition(' - ')[0]}", flush=True)
                return True
            if tested.returncode not in (0, 5):
                raise RuntimeError(f"fault {fault.name!r}: pytest {tests} ended with {tested.returncode}")
    finally:
        place.write_text(sound)
    print(f"NOT FOUND: {fault.name}", flush=True)
    return False


def _environment(root: Path) -> dict[str, str]:
    """The environment in which the copy is imported instead of what is installed."""
    return os.environ | {"PYTHONPATH": str(root), "CI": "true"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
