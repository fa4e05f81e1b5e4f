"""What a user who typed something wrong reads: one line that leads to what works."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.conftest import Command
from tests.support.study_folders import study_rows, write_study

LINE = 420
"""The most characters of a message about a name of which there are many."""

NAN = '{"name": "x", "world_size": 2, "links": [{"source": 0, "destination": 1, "bandwidth_bytes_per_s": NaN}]}'

COLLECTIVE = "predict full-mesh:4 --schedule ring --shard-bytes"
LAYER = "predict full-mesh:4 --seq 4Ki --schedule"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{COLLECTIVE} 64M", ["'64M'", "did you mean 64MB or 64MiB?"]),
        (f"{COLLECTIVE} 10PiB", ["'10PiB'", "KiB, MiB, GiB, TiB"]),
        (f"{COLLECTIVE} 1MiB --link-bandwidth 400Gb/s", ["did you mean 400Gbit/s?"]),
        (f"{COLLECTIVE} 1MiB --link-latency 5usec", ["did you mean 5us?"]),
        (f"{COLLECTIVE} 1MiB --shard-byte 1", ["--shard-byte", "Did you mean --shard-bytes?"]),
        (f"{COLLECTIVE} 1MiB --accelerators 8", ["Unknown option: --accelerators. tasp-lab predict --help lists all."]),
        ("predict full-mesh:4 --schedule ring,multi-ring --shard-bytes 1", ["--schedule ring --schedule multi-ring"]),
        ("compare full-mesh:4 --seq 4Ki --schedule usp:2x2,tasp", ["--schedule usp:2x2 --schedule tasp"]),
        ("predict full-mesh:4 --seq 4Ki", ["predict: --schedule is missing, see tasp-lab predict --help"]),
        ("predict", ["predict: TOPOLOGY is missing"]),
        ("predict h100-8 -schedule tasp --seq 8Ki", ["--schedule is missing, did you mean --schedule for -schedule?"]),
        ("profile show h100x", ["profile 'h100x' is unknown: did you mean 'h100'?"]),
        ("models", ['Unknown command "models". tasp-lab --help lists all.']),
        ("study shw", ['Did you mean "show"? tasp-lab study --help lists all.']),
        ("topologies show h100-8", ["unexpected argument 'h100-8', see tasp-lab topologies --help"]),
        (f"{COLLECTIVE} 1MiB --output x", ["Unknown option: --output. tasp-lab predict --help lists all."]),
        ("decompose torus4x4", ["(did you mean 'torus:4x4'?)"]),
        ("predict full-mesh:4 --schedule all-gather --shard-bytes 1", ["is a collective", "ring, multi-ring, direct"]),
        (f"{LAYER} tasp --set link.bandwidth=*2", ["'*2' is no factor, did you mean x2?"]),
        (f"{LAYER} tasp --set link.bandwidth=.5x", ["'.5x' is no factor, did you mean x.5?"]),
        (f"{LAYER} tasp --set link.bandwidth=50%", ["'50%' is no factor, did you mean x0.5?"]),
        ("study show", ["study show: FOLDER is missing"]),
        (f"{LAYER} zig-zag", ["'zig-zag'", "did you mean 'zigzag-ring-attention'?"]),
        (f"{LAYER} zig_zag_token", ["did you mean 'zigzag-token-ring'?"]),
        (f"{LAYER} tasp --window 100", ["window: 100", "--mask causal"]),
        (f"{LAYER} tasp --model meta-llama/Llama-3-70B", ["unknown model", "did you mean 'llama-3-70b'?"]),
        (f"{LAYER} tasp --model Qwen/Qwen3-8B", ["did you mean 'qwen3-8b'?"]),
        (f"{LAYER} tasp --model ./none.toml", ["none.toml", "cannot be read"]),
        (f"{LAYER} tasp --compute 300TFLOP/s", ["did you mean timed:300TFLOP/s?"]),
        (f"{LAYER} tasp --compute timed:300TFLOPS", ["did you mean 300TFLOP/s?"]),
        ("predict nan.json --schedule ring --shard-bytes 1", ["nan.json", "NaN is not allowed",
                                                              f"(byte {NAN.index('NaN')})"]),
        ("--json predict full-mesh:4", ["'--json' before the command, expected it after: tasp-lab COMMAND ... --json"]),
        ("study show studied --where \"machine = 'x'\"", ["machine = 'x'", "expected == to compare"]),
        ("compare full-mesh:4 --seq 4Ki --csv x", ["--csv", "to_pandas()"]),
        ("step h100-8 --model llama-3-8b --seq 8Ki --schedule ulysses --tp 8", ["--tp", "--heads 8 --kv-heads 1"]),
        ("predict h100-8 --schedule ring --shard-bytes 1 --set nic.bandwith=x2", ["has no NICs", "link.bandwidth",
                                                                                  "tasp-lab profile show h100-8"]),
        ("predict h100-2x8 --schedule ring --shard-bytes 1 --set nic.bandwith=x2", ["did you mean 'nic.bandwidth'"]),
        ("predict h100x8 --schedule ring --shard-bytes 1", ["'h100-8'", "tasp-lab topologies lists all"]),
        ("predict nothing --schedule ring --shard-bytes 1", ["such as h100-8", "full-mesh:8", "tasp-lab topologies"]),
        ("step torus:4x4 --model llama-3-8b --seq 8Ki --schedule tasp", ["parameters and gradients go straight",
                                                                         "no link 3->4", "--no-fsdp --pass forward"]),
        ("predict h200-9 --schedule ring --shard-bytes 1", ["1 node of 9 ranks, expected at most 8"]),
    ],
)  # fmt: skip
def test_a_wrong_command_is_answered_with_what_works(command: Command, line: str, words: list[str]) -> None:
    folder = command.folder
    (folder / "nan.json").write_text(NAN)
    if "studied" in line:
        write_study(folder / "studied", list(study_rows()))
    done = command(*shlex.split(line))
    (told,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert all(each in told for each in words), told
    assert "'direct'" not in told  # a schedule that nobody named
    assert len(told) < LINE


def test_what_the_messages_lead_to_works(command: Command) -> None:
    """The steps that the messages above propose."""
    shown = command("topologies").stdout
    assert all(form in shown for form in ("h100-NODESxRANKS", "full-mesh:N", "nodes:UxM"))
    line = "step torus:4x4 --model llama-3-8b --seq 8Ki --schedule tasp --no-fsdp --pass forward --json"
    done = command(*line.split())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["time_s"] > 0
