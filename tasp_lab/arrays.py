"""Aliases of NumPy array types."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

Int32Array = npt.NDArray[np.int32]
"""The type of rings and paths, chosen to save memory."""
