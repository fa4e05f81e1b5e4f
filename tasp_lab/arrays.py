"""Names of the array types that the core speaks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

Int32Array = npt.NDArray[np.int32]
"""Of rings and paths, which are many numbers: half the memory."""
