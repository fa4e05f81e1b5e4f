"""The version of tasp-lab, that of ``pyproject.toml``."""

VERSION = "0.2.0"
