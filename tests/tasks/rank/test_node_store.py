"""The store of one machine's ranks, served by a process that dies."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.tasks.rank.program import node_store
from prefect_torch.tasks.rank.program.node_store import open_node
from prefect_torch.tasks.rank.rendezvous import Rendezvous
from prefect_torch.tasks.rank.spec import MOST_SENDERS, RankSpec, on_machines
from prefect_torch.tasks.rank.user_code.function import PackedFunction

SERVE = """
import sys
from prefect_torch.tasks.rank.program.node_store import open_node
from prefect_torch.tasks.rank.rendezvous import Address, connect
from test_node_store import Place

address = Address("127.0.0.1", int(sys.argv[1]))
node = open_node(Place(rank=1, local_rank=0), connect(address))
node.key_value.set("served", b"yes")
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Place:
    """What `open_node` reads of a RankSpec: by default one of ranks 1 and 2, on the second machine of two."""

    rank: int = 1
    local_rank: int = 0
    local_world_size: int = 2
    world_size: int = 3
    node_rank: int = 1
    num_nodes: int = 2
    has_node_store: bool = True
    timeout_s: float | None = None


@pytest.fixture
def meeting():
    rendezvous = Rendezvous()
    key_value = rendezvous.serve()
    return rendezvous.address, key_value


def test_few_ranks_or_those_of_one_machine_speak_for_themselves(meeting):
    assert open_node(Place(has_node_store=False), meeting[1]) is None
    first = RankSpec(
        world_size=1,
        local_world_size=1,
        rendezvous=meeting[0],
        storage=StorageSpec("/"),
        run="run",
        attempt=1,
        restored=None,
        function=PackedFunction("m:f", b"", (), "/", "f"),
        use_gpu=False,
        backend=None,
    )
    for num_ranks in ((1000,), (1,) * 1000, (MOST_SENDERS // 2,) * 2):
        assert not any(spec.has_node_store for spec in on_machines(first, num_ranks))
    assert all(spec.has_node_store for spec in on_machines(first, (MOST_SENDERS, 1)))


def test_a_machine_with_one_rank_needs_no_store(meeting):
    node = open_node(Place(rank=0, local_world_size=1, node_rank=0), meeting[1])
    assert (node.number, node.num_nodes, node.ranks) == (0, 2, range(1))
    assert isinstance(node.key_value, MemoryKeyValue)


def test_the_ranks_of_a_machine_wait_for_the_first_one_as_long_as_a_group_does(meeting, monkeypatch):
    """It serves the store once it has imported the training function, which may build or download something."""
    waits = []

    def wait(_, key, longest_s):
        waits.append(longest_s)
        raise TimeoutError(key)

    monkeypatch.setattr(node_store, "wait_for_key", wait)
    for timeout_s in (None, 7.0):
        with pytest.raises(TimeoutError, match="port of node 1"):
            open_node(Place(rank=2, local_rank=1, timeout_s=timeout_s), meeting[1])
    assert waits == [1800.0, 7.0]


def test_the_store_of_a_machine_is_reached_by_its_ranks_until_its_first_rank_is_killed(meeting):
    address, key_value = meeting
    command = [sys.executable, "-c", SERVE, str(address.port)]
    path = {"PYTHONPATH": str(__file__).rpartition("/")[0]}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path) as first:
        assert first.stdout.readline() == b"ready\n"
        node = open_node(Place(rank=2, local_rank=1), key_value)
        assert node.ranks == range(1, 3)
        assert node.key_value.get(["served"], 5.0) == [b"yes"]
        assert node.key_value.add("counter", 1) == 1
        first.kill()
        first.wait()
    requests = [
        lambda: node.key_value.add("counter", 1),
        lambda: node.key_value.get(["served"], 1.0),
        lambda: node.key_value.check("served"),
        lambda: node.key_value.delete("served"),
    ]
    for request in requests:
        with pytest.raises(ConnectionError, match="the store of this machine's ranks is gone"):
            request()
    assert key_value.check("port of node 1")
