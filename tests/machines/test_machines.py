"""The machines of the catalogue against what their makers publish, in figures taken from elsewhere than the files."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tasp_lab.machines.catalogue import catalogue_names, load_machine


@dataclass(frozen=True)
class Published:
    """What one accelerator can move: inside its machine (or node) in both directions together, as makers count, and
    one way through its NIC. `source` is where the first figure is printed."""

    world_size: int
    both_ways_gb_per_s: float
    source: str
    nic_gbit_per_s: float = 0

    @property
    def out_bytes_per_s(self) -> float:
        return (self.both_ways_gb_per_s / 2 + self.nic_gbit_per_s / 8) * 1e9


AZURE = "MicrosoftDocs/azure-compute-docs, articles/virtual-machines/sizes/gpu-accelerated/includes"
NVLINK = "NVIDIA's table of NVLink generations, https://www.nvidia.com/en-us/data-center/nvlink"
H100 = f"900 GB/s: {NVLINK}; 400 Gbit/s per GPU: {AZURE}/ndh100v5-series-summary.md"
MI300X = f"896 GB/s aggregate; 400 Gbit/s per GPU: {AZURE}/ndmi300xv5-series-summary.md"
INTEL = "https://docs.habana.ai/en/latest/Management_and_Monitoring/Network_Configuration"
HUAWEI = "392 GB/s one way per NPU: Zuo et al., arXiv:2506.12708, section 3.2"
GB300 = "1.8 TB/s, 800 Gbit/s: https://www.nvidia.com/en-us/data-center/gb300-nvl72/"
ICI = "180 GB/s both ways per link: Austin et al., How to Scale Your Model, 2025, part 2"
TRN2 = "1.28 TB/s (GiB) per chip, 4/5 of it inside an instance: AWS Neuron documentation, Trainium2 Architecture"
PEER_COPIES = "no maker's figure, but what copies reach of PCIe 4.0 x16 both ways: NVIDIA/nccl#1614"
HOST_COPIES = "no maker's figure, but what copies through host memory reach one way, twice: NVIDIA/nccl#814"

PUBLISHED = {
    "a10-4-pcie": Published(4, 64 * 128 / 130, "PCIe Gen4 64 GB/s, here less line coding: NVIDIA A10 data sheet"),
    "a100-8": Published(8, 600, f"600 GB/s: {NVLINK}"),
    "a100_100g-2x8": Published(16, 600, f"600 GB/s: {NVLINK}; 200 Gbit/s: one ConnectX-6 for two GPUs", 200),
    "a800-8": Published(8, 400, "NVIDIA A800 80GB GPU data sheet, SXM, NVLink 400 GB/s"),
    "ascend-910b-8": Published(8, 2 * 196, "196 GB/s one way: Ascend/msmodeling 1e5a50b1, tensor_cast/device.py"),
    "ascend-910c-384": Published(384, 2 * 392, HUAWEI),
    "ascend-910c-8": Published(8, 2 * 392, HUAWEI),
    "b200-8": Published(8, 14_400 / 8, "DGX B200, 14.4 TB/s: https://www.nvidia.com/en-us/data-center/dgx-b200"),
    "b200_p6-2x8": Published(16, 14_400 / 8, "DGX B200, 14.4 TB/s, as above; 3,200 Gbit/s: AWS, EC2 P6 instances", 400),
    "b300-8": Published(8, 14_400 / 8, "DGX B300, 14.4 TB/s: NVIDIA DGX B300 data sheet"),
    "dgx-1v": Published(8, 300, f"300 GB/s: {NVLINK}"),
    "gaudi2-8": Published(8, 525, f"525 GB/s, total of the scale-up ports, note on Gaudi 2: {INTEL}"),
    "gaudi3-8": Published(8, 1050, f"1050 GB/s, total of the scale-up ports: {INTEL}"),
    "gaudi3-2x8": Published(16, 1050, f"1050 GB/s inside, 3 x 200 Gbit/s outside: {INTEL}", nic_gbit_per_s=600),
    "gaudi3-4x8": Published(32, 1050, f"1050 GB/s inside, 3 x 200 Gbit/s outside: {INTEL}", nic_gbit_per_s=600),
    "gb200-nvl72": Published(72, 1800, f"4 x 1.8 TB/s for four GPUs: {AZURE}/nd-gb200-v6-series-summary.md"),
    "gb300-2x1x4": Published(8, 1800, GB300, nic_gbit_per_s=800),
    "gb300-4x1x4": Published(16, 1800, GB300, nic_gbit_per_s=800),
    "gb300-nvl72": Published(72, 1800, GB300),
    "h100-2x8": Published(16, 900, H100, nic_gbit_per_s=400),
    "h100-2x8-rails": Published(16, 900, H100, nic_gbit_per_s=400),
    "h100-4x8": Published(32, 900, H100, nic_gbit_per_s=400),
    "h100-8": Published(8, 900, H100),
    "h100_a3mega-2x8": Published(16, 900, f"900 GB/s: {NVLINK}; 8 x 200 Gbit/s: Google Cloud, GPU machine types", 200),
    "h100_p5-2x8": Published(16, 900, f"900 GB/s: {NVLINK}; 3,200 Gbit/s: AWS, EC2 P5 instances", nic_gbit_per_s=400),
    "h20-8": Published(8, 900, "NVLink, 900 GB/s: NVIDIA H20 data sheet"),
    "h800-8": Published(8, 400, "NVLink of H800 in UltraAttn and zhuzilin/ring-flash-attention: 8 x H800, 400 GB/s"),
    "h200-8": Published(8, 900, f"NVLink, 900 GB/s: {AZURE}/nd-h200-v5-series-summary.md"),
    "l20-8-pcie": Published(8, 52, PEER_COPIES),
    "l20-8-pcie-switch": Published(8, 52, PEER_COPIES),
    "l40s-8-pcie": Published(8, 52, PEER_COPIES),
    "mi300x-2x8": Published(16, 896, MI300X, nic_gbit_per_s=400),
    "mi300x-4x8": Published(32, 896, MI300X, nic_gbit_per_s=400),
    "mi300x-8": Published(8, 896, MI300X),
    "mi325x-8": Published(8, 896, "seven links of 128 GB/s: AMD Instinct MI325X Platform data sheet"),
    "mi355x-8": Published(8, 1075, "1075 GB/s: TechRadar, 2025-09-01, on AMD's talk at Hot Chips 2025"),
    "rtx-pro-6000-8-pcie": Published(8, 104, "no maker's figure, but twice that of PCIe 4.0 x16: NVIDIA/nccl#1614"),
    "rtx4090-4-pcie": Published(4, 44.4, HOST_COPIES),
    "rtx4090d-8-pcie": Published(8, 44.4, HOST_COPIES),
    "tpu-v5p:4x4": Published(16, 4 * 180, f"four of six links: {ICI}"),
    "tpu-v5p:4x4x4": Published(64, 6 * 180, ICI),
    "tpu-v6e:4x4": Published(16, 4 * 180, f"four links, fewer at the edges: {ICI}"),
    "trn2-16": Published(16, 1.28e3 * 1024 / 1280 * 1.024**3, TRN2),
    "trn2-64": Published(64, 1.28e3 * 1.024**3, TRN2),
}
OPEN = {"tpu-v6e:4x4"}
"""Grids whose sides do not wrap around, so that chips at the edges send less."""

every_machine = pytest.mark.parametrize("name", catalogue_names())


def test_every_machine_has_a_published_figure() -> None:
    assert set(PUBLISHED) == set(catalogue_names())


@every_machine
def test_every_rank_sends_what_the_maker_publishes(name: str) -> None:
    """Published figures are whole GB/s both ways, so half of half a GB/s may be lost in them."""
    topology, published = load_machine(name).topology, PUBLISHED[name]
    assert topology.world_size == published.world_size
    for rank in range(topology.world_size):
        out_bytes_per_s = sum(link.bandwidth_bytes_per_s for link in topology.links if link.source == rank)
        if name in OPEN:
            assert out_bytes_per_s <= published.out_bytes_per_s
        else:
            assert out_bytes_per_s == pytest.approx(published.out_bytes_per_s, rel=0, abs=0.25e9)


@every_machine
def test_every_link_has_its_like_in_the_other_direction(name: str) -> None:
    links = load_machine(name).topology.links
    numbers = {(link.source, link.destination): (link.bandwidth_bytes_per_s, link.latency_s) for link in links}
    assert numbers == {(b, a): of_link for (a, b), of_link in numbers.items()}


@every_machine
def test_every_rank_is_linked_to_every_other_but_on_the_cube_mesh_and_on_grids(name: str) -> None:
    n = load_machine(name).topology.world_size
    linked = {"dgx-1v": 4, "tpu-v5p:4x4": 4, "tpu-v5p:4x4x4": 6, "trn2-16": 4, "trn2-64": 6}.get(name, n - 1)
    counts = load_machine(name).topology.linked_pairs.sum(axis=1).tolist()
    assert sorted(counts) == [2] * 4 + [3] * 8 + [4] * 4 if name in OPEN else counts == [linked] * n


@pytest.mark.parametrize("name", ["rtx4090-4-pcie", "rtx4090d-8-pcie"])
def test_copies_through_host_memory_share_both_ways_of_a_gpu(name: str) -> None:
    """30.5 GB/s in and out together, 22.2 GB/s one way alone: NVIDIA/nccl#814."""
    topology = load_machine(name).topology
    assert [each.bandwidth_bytes_per_s for each in topology.shared] == [30.5e9] * topology.world_size
    for rank, shared in enumerate(topology.shared):
        ends = {(link.source, link.destination) for link in topology.links if link.name in shared.links}
        assert {rank in each for each in ends} == {True}
        assert len(ends) == 2


def test_dgx_1v_is_a_cube_with_the_diagonals_of_two_faces_and_six_links_per_gpu() -> None:
    """So the white paper draws it: GPUs 0 to 3 and 4 to 7 each all to all, and one edge from each to the other four."""
    topology = load_machine("dgx-1v").topology
    pairs = {(link.source, link.destination) for link in topology.links}
    assert pairs == {(a, b) for a in range(8) for b in range(8) if a != b and (a // 4 == b // 4 or a % 4 == b % 4)}
    widths = [round(link.bandwidth_bytes_per_s / 25e9) for link in topology.links]
    assert sorted(widths) == [1] * 16 + [2] * 16
    for rank in range(8):
        assert sum(width for width, link in zip(widths, topology.links, strict=True) if link.source == rank) == 6
