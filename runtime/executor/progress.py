"""Which operations of a rank's part have happened, and which of those that wait for them may begin."""

from __future__ import annotations

from tasp_lab.schedule.dependencies import ARRIVED
from tasp_lab.schedule.rank_part import RankPart


class Progress:
    """The state of all operations during a run. Not thread-safe."""

    def __init__(self, part: RankPart) -> None:
        self._part = part
        self._unmet = {operation: len(conditions) for operation, conditions in part.waits.items()}

    def may(self, operation: int) -> bool:
        """Whether all conditions of an operation hold."""
        return not self._unmet.get(operation)

    def record(self, operation: int, event: int) -> list[int]:
        """Record that an operation has been sent, or has arrived; returns the joins that may now be made."""
        joins: list[int] = []
        for after in self._part.awaited.get((operation, event), ()):
            self._unmet[after] -= 1
            if not self._unmet[after]:
                if after >= self._part.first_join:
                    joins.append(after)
                elif after >= self._part.first_buffer:
                    joins += self.record(after, ARRIVED)
        return joins
