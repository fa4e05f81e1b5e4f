"""Functions by name, imported when they are called, so that a registry of them costs no import."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(module: str, function: str) -> Callable[..., Any]:
    """A function that imports `module` and calls its `function` each time it is called.

    >>> lazily("math", "sqrt")(4)
    2.0
    """

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(module), function)(*arguments, **options)

    return call
