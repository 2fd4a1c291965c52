"""A rank that lost its connection says to which rank, not to which address."""

from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.tasks.gang.lost_peers import describe_lost_connection

GLOO = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:19856"


def described(*exits, rank=0):
    shared = MemoryKeyValue()
    for it in exits:
        announce_exit(shared, it)
    return describe_lost_connection(shared, rank, GLOO, longest_s=0.0)


def test_the_only_other_rank_that_is_gone_is_named():
    own = RankExit(0, None, "died", GLOO)
    assert described(own, RankExit(1, 3, "failed", "ZeroDivisionError")) == "lost its connection to rank 1"
    assert described(own, RankExit(2, None, "died", "SIGKILL"), RankExit(1, 3, "returned")) == "lost its connection to rank 2"


def test_another_rank_that_lost_its_connection_is_not_the_cause():
    other = RankExit(2, 3, "failed", GLOO, is_consequence=True)
    assert described(other, RankExit(1, None, "died", "SIGKILL")) == "lost its connection to rank 1"
    assert described(other) == GLOO


def test_of_several_causes_none_is_named():
    exits = (RankExit(1, None, "died", "SIGKILL"), RankExit(2, None, "died", "SIGKILL"))
    assert described(*exits) == "lost its connection to other ranks"


def test_without_another_exit_the_library_s_error_stays():
    assert described() == GLOO
    assert described(RankExit(0, None, "died", GLOO)) == GLOO
