"""Decompositions of named topologies, with their provenance."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from tasp_lab.core.choices import DEFAULT_SEARCH_BUDGET
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part
from tasp_lab.core.units import format_bandwidth
from tasp_lab.prediction.inputs import MachineLike, Overrides, Parts, changed_machine, check_call, wires
from tasp_lab.prediction.provenance import Provenance, plain, topology_inputs
from tasp_lab.rings.options import RingOptions
from tasp_lab.rings.rings import Decomposition


@dataclass(frozen=True, eq=False, repr=False)
class DecompositionReport(Report, Decomposition):
    """A `tasp_lab.rings.rings.Decomposition` with its provenance."""

    provenance: Provenance = field(kw_only=True)

    def to_dict(self) -> dict[str, object]:
        return Decomposition.to_dict(self) | {"provenance": self.provenance.to_dict()}

    def records(self) -> list[dict[str, object]]:
        """A row per ring: its share, and its ranks in order."""
        return [
            {"ring": index, "share": float(share), "ranks": ring}
            for index, (ring, share) in enumerate(zip(self.rings.tolist(), self.shares, strict=True))
        ]

    def parts(self) -> list[Part]:
        plural = "s" if len(self.rings) != 1 else ""
        lines = [
            f"{self.topology.name}: {len(self.rings)} ring{plural} of fold {self.fold}, "
            f"{self.links_used} of {self.links_total} links used",
            self.reason,
        ]
        if len(self.rings):
            proof = "as much as such rings can" if self.proved_optimal else "not proved to be the most for rings"
            lines.append(
                f"{format_bandwidth(self.rate_bytes_per_s)} into every rank ({proof}): "
                f"{self.share_of_bound:.1%} of the AllGather bound of {format_bandwidth(self.bound_bytes_per_s)}"
            )
        if self.beyond_rings:
            lines.append("no rings reach the bound: all shards pass every cut with each ring, with trees only those "
                         "that must")  # fmt: skip
        equal = len(set(self.shares)) <= 1
        for ring, share in zip(self.rings.tolist(), self.shares, strict=True):
            lines.append(("" if equal else f"{float(share):6.2%}  ") + " ".join(str(rank) for rank in ring))
        return list(lines)


def decompose(
    topology: MachineLike,
    fold: int | None = None,
    *,
    overrides: Overrides = (),
    without: Parts = (),
    lanes: int | None = None,
    rail_aligned: bool | None = None,
    search_budget: int = DEFAULT_SEARCH_BUDGET,
    progress: ProgressCallback = no_progress,
) -> DecompositionReport:
    """Find the rings of a topology that carry most together.

    Parameters
    ----------
    topology : a topology, a machine, or its name.
    overrides, without : changes such as ``"link.0-3=10GB/s"``, and parts to remove, such as ``"link.0-3"``, see
        `tasp_lab.machines.overrides` and `tasp_lab.topology.missing`.
    fold, lanes, rail_aligned, search_budget, progress : see `tasp_lab.rings.decompose.decompose`.

    Raises `NoDecompositionError` with the reason where there are no such rings, and `TopologyError` for an unknown
    name.

    >>> decompose("full-mesh:4").fold
    2
    """
    check_call(decompose, locals())
    found_topology = changed_machine(wires(topology), overrides, without).topology
    options = RingOptions(fold, lanes, rail_aligned, search_budget)
    found = options.find(found_topology, progress)
    provenance = Provenance(
        {"topology": topology_inputs(found_topology), "rings": plain(options)}, search_complete=found.search_complete
    )
    values = {each.name: getattr(found, each.name) for each in fields(Decomposition)}
    return DecompositionReport(**values, provenance=provenance)
