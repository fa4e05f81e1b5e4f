"""The version of tasp-lab, that of ``pyproject.toml``."""

VERSION = __version__ = "0.2.0"
