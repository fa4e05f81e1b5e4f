"""Real namespaces, real packets."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest

from runtime.fabric import emulated as fabric
from runtime.fabric.emulated import check_directions, emulate, missing_here, packet_size_bytes
from runtime.linux import CLONE_NEWNET, join_namespace
from runtime.protocol.jobs import MeasurePair, PairTimes, RankLocation, RunSchedule
from runtime.protocol.records import RankRecord
from runtime.ranks.launcher import launch
from tasp_lab.core.errors import FabricError
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.graph import Link, SharedCapacity, Topology
from tasp_lab.workload.layer import Workload
from tests.conftest import ROOT
from tests.support.links import without_links

pytestmark = pytest.mark.fabric

RATE = 5e6


def in_namespace(descriptor: int, program: str) -> str:
    """What a Python program prints inside a network namespace."""
    done = subprocess.run(
        [sys.executable, "-c", program], pass_fds=[descriptor], capture_output=True, text=True, check=True, cwd=ROOT,
        preexec_fn=lambda: join_namespace(descriptor, CLONE_NEWNET),
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    "topology",
    [
        full_mesh(3, RATE, 0.0),
        switch(4, RATE, 0.0),
        ring(4, RATE, 0.0),
        nodes(2, 2, link_bandwidth_bytes_per_s=RATE, nic_bandwidth_bytes_per_s=RATE / 2),
        nodes(2, 2, "switch", "rails", link_bandwidth_bytes_per_s=RATE, nic_bandwidth_bytes_per_s=RATE / 2),
    ],
    ids=lambda topology: topology.name,
)
def test_any_topology_carries_schedules(topology: Topology) -> None:
    """Data arrives bit for bit, and not faster than the links of the model allow (less a token bucket's credit)."""
    shard = 200_000
    with emulate(topology) as built, launch(built) as ranks:
        for name in ("ring", "multi-ring"):
            schedule = collective(name, topology, shard)
            results = ranks.perform(RunSchedule(schedule, "p2p", repeats=1), longest_silence_s=20)
            records = [record for of_rank in results if isinstance(of_rank, list) for record in of_rank]
            assert all(isinstance(record, RankRecord) for record in records)
            slowest = min(float(link.bandwidth_bytes_per_s) for link in topology.links)
            into_a_rank = sum(float(link.bandwidth_bytes_per_s) for link in topology.links if link.destination == 0)
            credit = 4 * fabric.BUCKET_PACKETS * packet_size_bytes(RATE) / slowest
            assert max(record.time_s for record in records) > (topology.world_size - 1) * shard / into_a_rank - credit


DEAD_LINK = without_links(torus((2, 4), RATE, 0.0), ["0-1"])


def bytes_sent(locations: Sequence[RankLocation]) -> dict[str, int]:
    """The bytes that each link of ranks has carried, with headers, by its name."""
    program = "print(open('/proc/net/dev').read())"
    sent = {}
    for rank, location in enumerate(locations):
        for line in in_namespace(location.network_namespace, program).splitlines():
            name, _, counts = line.strip().partition(":")
            if name.startswith("to"):
                sent[f"{rank}->{name.removeprefix('to')}"] = int(counts.split()[8])
    return sent


def test_messages_pass_the_links_of_their_routes() -> None:
    """Where ranks have no link, namespaces of others forward; routes to a rank may part by where they come from."""
    size = 2_000_000
    loads = dict.fromkeys((link.name for link in DEAD_LINK.links), 0)
    onward: dict[tuple[object, int], set[object]] = defaultdict(set)
    for pair in permutations(range(8), 2):
        for link in (DEAD_LINK.links[index] for index in DEAD_LINK.route(*pair).links):
            loads[link.name] += size
            onward[link.source, pair[1]].add(link.destination)
    assert max(map(len, onward.values())) == 2
    with emulate(DEAD_LINK) as built, launch(built) as ranks:
        before = bytes_sent(built)
        schedule = collective("all-to-all", DEAD_LINK, size)
        results = ranks.perform(RunSchedule(schedule, "p2p", repeats=1), longest_silence_s=60)
        carried = {name: count - before[name] for name, count in bytes_sent(built).items()}
    records = [record for of_rank in results if isinstance(of_rank, list) for record in of_rank]
    assert len(records) == 8
    # frames have at most 5 % of headers, and acknowledgements go the other way: every two packets of it at most
    assert carried == pytest.approx(loads, rel=0.05, abs=0.02 * size)
    credit = fabric.BUCKET_PACKETS * packet_size_bytes(RATE) / RATE
    assert max(record.time_s for record in records) > max(loads.values()) / RATE - credit


def test_attention_runs_around_a_dead_link() -> None:
    """Each rank compares its results with attention in float64 when it has warmed up, and fails if they differ."""
    layer = Workload(480, heads=8, head_dim=32, mask="causal", dtype="fp32")
    with emulate(DEAD_LINK) as built, launch(built) as ranks:
        for name in ("ulysses", "zigzag-ring-attention", "tasp"):
            (schedule,) = attention_schedules(name, DEAD_LINK, layer)
            results = ranks.perform(RunSchedule(schedule, "p2p", repeats=1, warm_ups=1), longest_silence_s=60)
            assert [len(of_rank) for of_rank in results if isinstance(of_rank, list)] == [1] * 8


def test_messages_against_a_one_way_link_are_refused() -> None:
    around = ring(4, RATE, 0.0)
    check_directions(around, collective("ring", around, 1000))
    expected = "ring:4: schedule 'all-to-all' sends from rank 0 to 3, whose link is one way, from 3 to 0"
    with pytest.raises(FabricError, match=expected):
        check_directions(around, collective("all-to-all", around, 1000))


@pytest.mark.alone
def test_a_link_has_the_bandwidth_of_the_model_in_both_directions() -> None:
    """Point to point, the slope of time over bytes is the link's rate, less up to 8 % of packet headers.

    A link that was idle passes two packets at once, here 4 % of what the two messages differ by.
    """
    topology = full_mesh(2, RATE, 0.0).map_links(
        lambda index, link: link if index == 0 else Link(1, 0, RATE / 4, 0.0), name="lopsided"
    )
    with emulate(topology) as built, launch(built) as ranks:
        for source, bandwidth in ((0, RATE), (1, RATE / 4)):
            sizes = (int(bandwidth * 0.1), int(bandwidth * 0.5))
            fastest = dict.fromkeys(sizes, float("inf"))
            for _ in range(10):  # the fastest message is the one that nothing has disturbed
                results = ranks.perform(MeasurePair(source, 1 - source, sizes, repeats=3), longest_silence_s=20)
                times = next(result for result in results if isinstance(result, PairTimes))
                for size, seconds in times.answered_s:
                    fastest[size] = min(fastest[size], seconds)
                found = (sizes[1] - sizes[0]) / (fastest[sizes[1]] - fastest[sizes[0]])
                if 0.85 * bandwidth < found < 1.02 * bandwidth:
                    break
            assert 0.85 * bandwidth < found < 1.02 * bandwidth


def test_namespaces_are_private_and_shaped() -> None:
    with emulate(full_mesh(3, RATE, 0.0)) as built, emulate(full_mesh(3, RATE, 0.0)):
        namespace = built[0].network_namespace
        program = "import os; print(*sorted(os.listdir('/proc/sys/net/ipv4/conf')))"
        assert set(in_namespace(namespace, program).split()) == {"all", "default", "lo", "rank", "rankp", "to1", "to2"}
        program = "print(open('/proc/sys/net/ipv4/tcp_congestion_control').read())"
        assert in_namespace(namespace, program).strip() == "reno"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(namespace)


TWO_RECEIVERS = """
import select, socket, sys
from runtime.linux import CLONE_NEWNET, CLONE_NEWUSER, join_namespace

user, *ranks = map(int, sys.argv[1:])
if user >= 0:
    join_namespace(user, CLONE_NEWUSER)

def connection(receiver):
    join_namespace(ranks[receiver], CLONE_NEWNET)
    listener = socket.create_server((f"10.64.0.{receiver + 1}", 0))
    join_namespace(ranks[0], CLONE_NEWNET)
    return socket.create_connection(listener.getsockname()), listener.accept()[0]

(to_first, first), (to_second, second) = connection(1), connection(2)
for sender, receiver in ((to_first, first), (to_second, second)):  # only then a connection knows its pace
    sender.sendall(bytes(50_000))
    receiver.recv(50_000, socket.MSG_WAITALL)
for sender in (to_first, to_second):
    sender.sendall(bytes(500_000))
received = 0
while not select.select([second], [], [], 0)[0]:
    if select.select([first, second], [], [])[0] == [first]:
        received += len(first.recv(2**20))
print(received)
"""


def test_connections_share_a_link_in_turns() -> None:
    """Of two messages to two ranks, sent at once, the second one arrives as soon as a few packets of the first have.

    Without turns 100 kB of the first message pass before, and the second receiver's port is idle meanwhile.
    """
    with emulate(switch(3, 1e6, 0.0)) as built:
        ranks = [each.network_namespace for each in built]
        user = built[0].user_namespace
        passed = []
        for _ in range(3):  # a busy host reads late
            done = subprocess.run(
                [sys.executable, "-c", TWO_RECEIVERS, str(user), *map(str, ranks)], cwd=ROOT, check=True,
                pass_fds=[*ranks, *([user] if user >= 0 else [])], capture_output=True, text=True,
            )  # fmt: skip
            passed.append(int(done.stdout))
    assert min(passed) < 50_000


def test_nothing_is_left_outside() -> None:
    before = sorted(os.listdir("/sys/class/net"))
    with emulate(switch(3, RATE, 0.0)):
        assert sorted(os.listdir("/sys/class/net")) == before


def test_a_shared_capacity_is_refused() -> None:
    mesh = full_mesh(2, RATE, 0.0)
    shared = Topology("bus", 2, mesh.links, (SharedCapacity("bus", RATE, ("0->1",)),))
    with pytest.raises(FabricError, match="bus: shared capacity 'bus' cannot be built from links"), emulate(shared):
        pass


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="must be root to become somebody else")


@needs_root
def test_it_works_without_root() -> None:
    """Nobody has no privilege; a user namespace gives the ranks one of their own."""
    program = (
        "from runtime.fabric.emulated import emulate\n"
        "from runtime.protocol.jobs import RunSchedule\n"
        "from runtime.ranks.launcher import launch\n"
        "from tasp_lab.schedules.build import collective\n"
        "from tasp_lab.topology.builders import full_mesh\n"
        "mesh = full_mesh(2, 5e6, 0.0)\n"
        "with emulate(mesh) as built, launch(built) as ranks:\n"
        "    ranks.perform(RunSchedule(collective('ring', mesh, 1000), 'p2p', 1), 20)\n"
        "import os\n"
        "print(os.getuid())\n"
    )
    nobody = pwd.getpwnam("nobody")
    become = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    done = run(["unshare", "-m", "sh", "-c", f'{opened_folders()} exec "$@"', "sh", *become], program)
    assert (done.stdout.strip(), done.returncode) == (str(nobody.pw_uid), 0), done.stderr


def opened_folders() -> str:
    """Shell lines that, in a mount namespace of its own, let everybody reach this interpreter and these sources."""
    closed: dict[Path, Path] = {}
    for path in {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT.resolve()}:
        for parent in path.parents:
            if not parent.stat().st_mode & 0o001:
                closed[path] = parent
    keep = [f"mkdir $kept/{at}; mount --bind {path} $kept/{at};" for at, path in enumerate(closed)]
    cover = [f"mount -t tmpfs -o mode=755 none {parent};" for parent in sorted(set(closed.values()))]
    bring_back = [f"mkdir -p {path}; mount --move $kept/{at} {path};" for at, path in enumerate(closed)]
    return " ".join(["set -e; kept=$(mktemp -d);", *keep, *cover, *bring_back])


@needs_root
def test_no_permission_is_one_line() -> None:
    program = "from runtime.fabric.emulated import missing_here\nprint(missing_here())\n"
    told = run(["setpriv", "--bounding-set=-sys_admin"], program).stdout.strip()
    assert (
        told
        == "[Errno 1] unshare: Operation not permitted (it needs CAP_SYS_ADMIN and CAP_NET_ADMIN, veth and sch_tbf)"
    )


def run(wrapper: list[str], program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with this interpreter behind a wrapper."""
    return subprocess.run(
        [*wrapper, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        env={"HOME": "/tmp", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def test_this_machine_can() -> None:
    assert missing_here() is None


def test_other_systems_are_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert missing_here() == "it needs Linux, this is Darwin"
    with pytest.raises(FabricError, match="it needs Linux"), emulate(full_mesh(2)):
        pass
