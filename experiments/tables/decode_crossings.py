"""From which concurrency on keys spread over ranks pay in decoding, beside crossings that SGLang published.

``python -m experiments.tables.decode_crossings`` writes ``experiments/results/decode_crossings.md`` in a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, log2

from experiments.common import RESULTS, markdown_table, write_page
from tasp_lab.core.progress import print_progress
from tasp_lab.core.units import count_of, format_time
from tasp_lab.prediction.predict import predict
from tasp_lab.workload.layer import Workload

PUBLISHED: Mapping[str, tuple[int, int]] = {"32Ki": (8, 16), "64Ki": (4, 8), "128Ki": (2, 4), "256Ki": (0, 1)}
"""By cached keys: the last concurrency at which tensor parallelism alone is ahead, and the first at which it is behind;
sgl-project/sglang issue 33926, 8 GPUs with TP 8, DCP 8."""

MACHINES = ("h200-8", "b200-8")
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
SPREAD = ("decode-all-to-all", "decode-reduce-scatter", "decode-tree")

HEAD = """\
From which concurrency on decode context parallelism beats plain tensor parallelism, made by `python -m \
experiments.tables.decode_crossings`: predicted, beside what \
[SGLang](https://github.com/sgl-project/sglang/issues/33926) published.

Assumptions: the attention of one layer of DeepSeek's kind, absorbed MLA (128 heads, one latent KV head of 576, whose \
first 512 elements are the values), bf16, on 8 GPUs, TP 8 and DCP 8, concurrency as the batch of a decode step, all \
sequences equally long. The rest of a layer takes the same time in both. The issue's GPUs are not known here: the \
weights of DeepSeek-V3, 671 GB in fp8, fit into 8 H200 or 8 B200, not into 8 H100. Hosts take no time (CUDA graphs). \
No constant was fitted to these crossings.

A crossing `8 to 16` means that tensor parallelism is ahead at 8 and behind at 16. Steps are doublings of concurrency \
from the published crossing to the predicted one; negative ones are too early. Not counted, which makes crossings \
early: kernels that scale and merge results, and gaps between kernels and messages."""


def layer(keys: str, batch: int) -> Workload:
    """The attention of one layer of a decode step."""
    latent = Workload(decode=True, cached_keys=count_of(keys), heads=128, kv_heads=1, head_dim=576, value_dim=512)
    return replace(latent, batch=batch, values_in_keys=True)


def times_of(machine: str, keys: str) -> Mapping[str, Sequence[float]]:
    """The time of each schedule in seconds, by concurrency."""
    names = ("decode-heads", *SPREAD)
    rows = [predict(machine, names, layer(keys, batch), samples=0) for batch in CONCURRENCY]
    return {name: [float(row[number].time_s) for row in rows] for number, name in enumerate(names)}


def crossing(alone: Sequence[float], spread: Sequence[float]) -> tuple[int, int]:
    """The last concurrency at which the first is ahead, 0 for none, and the next one; 0 where there is none."""
    losing = [number for number, (one, other) in enumerate(zip(alone, spread, strict=True)) if one <= other]
    after = max(losing, default=-1) + 1
    return (CONCURRENCY[after - 1] if after else 0), (CONCURRENCY[after] if after < len(CONCURRENCY) else 0)


def text(found: tuple[int, int]) -> str:
    """A crossing in words."""
    last, first = found
    return "always ahead" if not last else f"{last} to {first}" if first else f"beyond {last}"


def steps(found: tuple[int, int], published: tuple[int, int]) -> str:
    """How many doublings a crossing is later than the published one."""
    return f"{log2(found[1] / published[1]):+.0f}" if found[1] else "-"


def page() -> str:
    """The page of Markdown."""
    parts, farthest = [HEAD, ""], dict.fromkeys(SPREAD, 0.0)
    for machine in MACHINES:
        rows, times = [], {}
        for keys, published in PUBLISHED.items():
            print_progress(f"{machine}, {keys}")
            times[keys] = times_of(machine, keys)
            found = {name: crossing(times[keys]["decode-heads"], times[keys][name]) for name in SPREAD}
            cells = [cell for name in SPREAD for cell in (text(found[name]), steps(found[name], published))]
            rows.append([keys, text(published), *cells])
            for name, (_, first) in found.items():
                far = abs(log2(first / published[1])) if first else inf
                farthest[name] = max(farthest[name], far)
        titles = ["cached keys", "SGLang", *(title for name in SPREAD for title in (name, "steps"))]
        parts += [f"## {machine}", markdown_table(titles, rows)]
        shown = [[keys, str(batch), *(format_time(times[keys][name][at]) for name in ("decode-heads", *SPREAD))]
                 for keys in PUBLISHED for at, batch in enumerate(CONCURRENCY)]  # fmt: skip
        parts.append(markdown_table(["cached keys", "concurrency", "decode-heads", *SPREAD], shown))
    apart = [f"`{name}`, {far:.0f}" if far < inf else f"`{name}`, beyond {CONCURRENCY[-1]}"
             for name, far in farthest.items()]  # fmt: skip
    parts[1] = f"Steps apart at most: {'; '.join(apart)}. SGLang ships the first, vLLM the first two, the tree nobody."
    return "\n\n".join(parts)


if __name__ == "__main__":
    write_page(RESULTS / "decode_crossings.md", page())
