"""Names that are imported when they are first used: of a package, and of packages that stand above their callers.

__getattr__, __dir__ = lazy_names(__name__, {"predict": "tasp_lab.prediction.predict"})
draw = from_above("draw timelines")  # as Timeline.plot does: pictures stand above timelines
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # this module is imported before Ctrl-C is handled: it imports nothing itself
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package, whose names are in these modules.

    >>> find, names = lazy_names("tasp_lab.core", {"format_size": "tasp_lab.core.units"})
    >>> find("format_size")(2048)
    '2 KiB'

    Each name is entered into the package, so it is looked up once. Raises `AttributeError` for other names.
    """
    here = vars(sys.modules[package])

    def find(name: str) -> object:
        from importlib import import_module

        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        here[name] = getattr(import_module(modules[name]), name)
        return here[name]

    def names() -> list[str]:
        return sorted({*here, *modules})

    return find, names


ABOVE: dict[str, str] = {}
"""What packages do for those below them, ``module:function`` by task; `tasp_lab`, which stands above all, enters it."""


def from_above(task: str) -> Callable[..., Any]:
    """The function for a task of `ABOVE`."""
    from importlib import import_module

    module, _, name = ABOVE[task].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
