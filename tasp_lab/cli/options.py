"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object and nothing else on stdout.")]
