"""Trainings on several hosts: network namespaces, whose cables can be cut."""

import pytest
from network_hosts import NO_NAMESPACES, can_make_hosts, network
from prefect_torch.flows import FailureConfig, Hosts, NotEnoughMachinesError, RunConfig, ScalingConfig, train

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason=NO_NAMESPACES)


@pytest.fixture(scope="module")
def hosts():
    with network("a", "b", "c") as made:
        yield made
        assert {host: made.processes(host) for host in made.names} == {"a": [], "b": [], "c": []}


@pytest.fixture
def run(tmp_path):
    return RunConfig(name="run", storage=str(tmp_path / "store"))


def cluster(hosts, *names, **more):
    return Hosts(list(names), command=hosts.command, leader_address=hosts.address, **{"wait_s": 0, **more})


def test_ranks_on_two_hosts_are_told_where_they_are(hosts, run):
    """Two ranks on one host and one on the other: torchrun's variables, and a group of the user's own by env://."""
    scaling = ScalingConfig(num_workers=3, cluster=cluster(hosts, "a", "b", ranks_per_host=2))
    result = train("machine_trainings:tell_places", {}, scaling, run)
    told = result.return_value
    assert [rank["host"] for rank in told] == ["a", "a", "b"]
    common = {"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses["a"], "GLOO_SOCKET_IFNAME": "lan0"}
    for rank, (node, local, on_node) in zip(told, [(0, 0, 2), (0, 1, 2), (1, 0, 1)], strict=True):
        expected = {
            **common,
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(on_node),
            "GROUP_RANK": str(node),
            "NODE_RANK": str(node),
            "MASTER_PORT": told[0]["variables"]["MASTER_PORT"],
        }
        assert {name: rank["variables"][name] for name in expected} == expected
        assert rank["context"] == [node, local, on_node]
        assert rank["sum"] == rank["sum of my own group"] == 3.0


def test_no_rank_is_started_unless_there_is_room_for_all(hosts, run):
    scaling = ScalingConfig(num_workers=4, cluster=cluster(hosts, "a", "b", "c", "nowhere", ranks_per_host=1))
    with pytest.raises(NotEnoughMachinesError) as caught:
        train("machine_trainings:tell_places", {}, scaling, run, failure=FailureConfig(max_infrastructure_failures=0))
    assert str(caught.value).startswith(
        "4 ranks wanted, the cluster has room for 3: a: 1; b: 1; c: 1; nowhere: its command ended with 1: nsenter: "
    )
