"""Tables 5 and 6 of LASP-2 (arXiv:2502.07563) held against each other and against predictions."""

from __future__ import annotations

from itertools import pairwise

from experiments.reproductions.lasp2.exchanges import FABRICS, GPUS, HEADLINES, LAYERS, STATE_BYTES, gather_s
from experiments.reproductions.lasp2.gaps import all_pairs_s, keys_into_a_node_s
from experiments.reproductions.lasp2.iterations import FOLDER, gap_ms, iteration_s, iterations_s
from experiments.reproductions.ranges import Check, Range, read_record


def grown_s() -> Range:
    """How much longer the gathers of an iteration take on 128 GPUs than on 16."""
    return Range.of(*(2 * LAYERS * (gather_s(each, gpus=128) - gather_s(each, gpus=16)) for each in FABRICS))


def split_s() -> Range:
    """How much longer the gathers of an iteration take in 64 pieces each."""
    return Range.of(*(2 * LAYERS * (64 * gather_s(each, STATE_BYTES // 64) - gather_s(each)) for each in FABRICS))


def split_published_s() -> float:
    """How much an iteration changes between one gather and 64."""
    split = [row["tokens_per_s"] or 0 for row in read_record(FOLDER / "split.csv")]
    return 1048576 * (1 / min(split) - 1 / max(split))


def checks() -> list[Check]:
    """The tables held against each other and against predictions."""
    times = iterations_s()
    split = [row["tokens_per_s"] or 0 for row in read_record(FOLDER / "split.csv")]
    table6, short = 1048576 / times[1048576, GPUS], [t for (length, _), t in times.items() if length <= 131072]
    spread = {length: [t for (s, _), t in times.items() if s == length] for length in (2048, 16384, 131072, 262144)}
    fastest = any(t[-1] == min(t) for t in spread.values())
    grows = [times[16384 * n, n] for n in (16, 32, 64, 128)]
    rises = all(times[a, g] / a >= times[b, g] / b for g in (16, 32, 64, 128)
                for a, b in pairwise(sorted(length for length, gpus in times if gpus == g)))  # fmt: skip
    rings = {length: (iteration_s(length).high, gap_ms(length, "over_ring_percent").high / 1e3) for length in HEADLINES}
    return [
        Check("The gains hold at 2097152 positions on 64 GPUs.",
              f"Table 6 has {'no number' if (2097152, GPUS) not in times else 'a number'} there: out of memory.",
              "A contradiction: the iteration behind the headline is not tabulated."),
        Check("1048576 positions on 64 GPUs: 486183 tokens/s in Table 5.",
              f"Table 6: {table6:.0f}, so Table 5 is {split[0] / table6 - 1:.1%} above it.",
              "A contradiction, or 10 % of uncertainty: more than the gain over LASP at 524288 positions."),
        Check("Throughput grows with the sequence (Table 6).",
              f"It {'never falls' if rises else 'falls'}. Up to 131072 positions an iteration takes {min(short):.2f} "
              f"to {max(short):.2f} s, whatever the length, a factor of 64.",
              "An iteration is nearly all fixed cost there, so throughput measures the length."),
        Check("The number of GPUs (Table 6).",
              "At equal lengths iterations on 16 to 128 GPUs differ by "
              f"{', '.join(f'{max(t) / min(t) - 1:.0%}' for t in spread.values())} (2048 to 262144 positions), and "
              f"128 are {'sometimes' if fastest else 'never'} the fastest.",
              "No work that GPUs share shows: overhead-bound."),
        Check("16384 positions per GPU on 16, 32, 64 and 128 GPUs (Table 6).",
              f"An iteration takes {', '.join(f'{each:.2f}' for each in grows)} s, {grows[-1] - grows[0]:.2f} s more; "
              f"the gathers of states are predicted to grow by {grown_s().text('.3f')} s.",
              "The gather explains at most a quarter, with one NIC per node; the rest grows with GPUs, too."),
        Check("The gather may be split (Table 5): 2048 to 32, so 1 to 64 gathers.",
              f"An iteration changes by {1e3 * split_published_s():.2f} ms; 63 more gathers in "
              f"each pass of each layer are predicted to take {split_s().text('.2f')} s longer, and are "
              f"{63 * 2 * LAYERS} more launches.",
              "A split into gathers one after another, each a call, cannot cost so little."),
        Check("The gather of states is cheap.",
              "Predicted for all layers and both passes, not overlapped: "
              f"{Range.of(*(2e3 * LAYERS * gather_s(f) for f in FABRICS)).text('.0f')} ms of an iteration of "
              f"{1e3 * times[524288, GPUS]:.0f} ms (524288 positions).",
              "Confirmed: 1 to 5 % of an iteration."),
        *(Check(f"Ring Attention multiplies all pairs, on 64 GPUs, {length} positions.",
                f"At peak rate and perfectly balanced that takes {all_pairs_s(length):.1f} s; the published iteration "
                f"takes at most {ring_s + gap_s:.1f} s.", "Impossible: the baseline did something else.")
          for length, (ring_s, gap_s) in rings.items()),
        *(Check(f"Ring Attention moves all keys around 64 GPUs, {length} positions.",
                f"Into the last node they take at least {keys_into_a_node_s(length, 8):.2f} s through eight NICs of "
                f"200 Gbit/s; the gap to LASP-2 is at most {gap_s:.2f} s.",
                "Impossible, unless the rest of the iteration hides it.")
          for length, (_, gap_s) in rings.items()),
    ]  # fmt: skip
