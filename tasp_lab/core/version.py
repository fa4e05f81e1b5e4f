"""The version of tasp-lab, that of ``pyproject.toml``, and that of its answers."""

VERSION = __version__ = "0.2.0"

MODEL_VERSION = 15
"""The version of the engines and models. Raise it whenever an answer changes: stored answers of another version are not
used. `tests/prediction/test_golden_answers.py` fails where answers changed and this number did not."""
