"""Optional packages of studies, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tasp_lab.core.errors import MissingPackageError


def needed(module: str, what: str) -> Any:
    """Import an optional module for `what`; without it `MissingPackageError` names the extra that has it.

    >>> needed("math", "this example").sqrt(4)
    2.0
    >>> needed("no_such_package", "a study")
    Traceback (most recent call last):
    ...
    tasp_lab.core.errors.MissingPackageError: a study needs no_such_package, expected: pip install 'tasp-lab[studies]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(f"{what} needs {package}, expected: pip install 'tasp-lab[studies]'") from error
