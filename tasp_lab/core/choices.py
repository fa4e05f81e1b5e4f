"""Values that options accept by name, and their defaults. This module imports nothing heavy: the command line needs it
before anything is computed.
"""

from __future__ import annotations

from typing import Literal

AttentionKind = Literal["softmax", "linear", "hybrid"]
"""Kinds of attention layers, and stacks of both."""

KindChoice = Literal["softmax", "linear", "hybrid", "all"]
"""A kind of layers, or all kinds."""

Decay = Literal["none", "head", "scalar", "channel"]
"""Decay of the state of linear attention: none, a constant per KV head, or one that depends on the data, per position
and KV head or also per channel of the keys."""

Dtype = Literal["bf16", "fp16", "fp32", "fp8"]
"""Dtypes of queries, keys, values and the result."""

WHAT_IF_DTYPE = "fp8"
"""A dtype that is only predicted, the forward pass of softmax attention: no kernel here has it, and no transport."""

Pass = Literal["forward", "backward", "both"]
"""Passes of an attention layer; both: forward, then backward."""

Dataflow = Literal["auto", "rotate-kv", "rotate-kv-back", "rotate-q"]
"""Dataflows of a backward pass, see `tasp_lab.schedules.attention.backward`."""

Direction = Literal["auto", "ascending", "descending"]
"""Of a single ring: from each rank to the next higher or lower one; auto: the one that sends fewer bytes."""

WireDtype = Literal["auto", "fp32", "input"]
"""Of results or gradients on the wire; input: the layer's dtype; auto: fp32 for sums that grow on their way, else
input."""

Travelling = Literal["auto", "keys", "queries", "both"]
"""What travels around the rings of ``kv-and-q-rings``; both: for each pair of ranks the side with fewer bytes."""

Routes = Literal["direct", "one", "all"]
"""Routes between ranks that are not linked: none, the first of the shortest, or all of them in turn."""

FabricKind = Literal["emulated", "local", "torchrun"]
"""Where ranks run: between network namespaces, as plain processes, or as torchrun started them."""

BackendKind = Literal["auto", "nccl", "gloo"]
"""What torch sends messages with under torchrun: auto is nccl (RCCL on AMD) with a GPU per rank, else gloo where no
GPUs are meant."""

TransportKind = Literal["auto", "p2p", "batched", "all-to-all", "symmetric-memory"]
"""How ranks exchange blocks."""

Checkpointing = Literal["none", "selective", "full", "offload"]
"""What the backward pass of a step computes again: nothing, all of a layer but attention, or all of it; offload: all of
it, from layer inputs that are in the memory of the host."""

MatrixDtype = Literal["bf16", "fp8"]
"""Of multiplications with the parameters of a model."""

DEFAULT_BUFFERS = 3
"""Buffers of a rank: one to compute with, one that fills, one whose receive is posted before its block is sent, as gloo
needs it."""

DEFAULT_STAGES = 4
"""Parts in which keys arrive: one part of calls or of transfers in about four is exposed at most, and messages of a
quarter of a shard are still large. MagiAttention's guides use 1 to 4."""

ExportFormat = Literal["msccl++", "msccl-xml", "chakra", "nccl-graph", "nccl-tuner"]
"""Formats of other engines, see `tasp_lab.formats`."""

Preference = Literal["memory", "bytes", "library", "time"]
"""What decides between schedules that are expected to be equally fast."""
DEFAULT_SEARCH_BUDGET = 30_000_000
"""Operations of a search for rings: about half a minute."""
