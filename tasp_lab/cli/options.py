"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object and nothing else on stdout.")]

FabricKind = Literal["emulated", "local", "torchrun"]
"""Where ranks run: between network namespaces, as plain processes, or as torchrun started them."""
