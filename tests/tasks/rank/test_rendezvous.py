import os
import re
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.tasks.rank import rendezvous
from prefect_torch.tasks.rank.program.group_store import GroupStore, machines_named
from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, TcpKeyValue, connect, wait_for_key
from rank_specs import rank_spec
from torch.distributed import DistNetworkError, DistStoreError

TCP = Path("/proc/net/tcp")


@pytest.fixture(params=["memory", "tcp"])
def key_values(request):
    """Two ends of one dictionary."""
    if request.param == "memory":
        shared = MemoryKeyValue()
        return shared, shared
    meeting = Rendezvous()
    served = meeting.serve()
    return served, connect(meeting.address)


def test_what_one_sets_the_other_gets(key_values):
    one, other = key_values
    one.set("a b/c", b"\x00\xff" * 1000)
    one.set("empty", b"")
    assert other.get(["a b/c", "empty"], 1.0) == [b"\x00\xff" * 1000, b""]
    assert other.check("empty")
    assert not other.check("missing")


def test_a_value_of_any_size_and_content_is_got_whole_and_leaves_nothing(key_values):
    one, other = key_values
    large = os.urandom(9 * 2**20)  # torch's server takes 8 MiB
    values = {"large": large, "twice": large[:-1], "alike": rendezvous._IN_PARTS + b"2"}
    one.set("alike", large)
    one.set_all(values)
    assert other.get(list(values), 10.0) == list(values.values())
    one.set("twice", b"small")
    assert other.get(["twice"], 10.0) == [b"small"]
    for key in values:
        other.delete(key)
        assert not other.check(key)
    if isinstance(one, TcpKeyValue):
        assert other.store.num_keys() <= 1  # torch's own


def test_a_get_waits_until_all_are_set(key_values):
    one, other = key_values
    one.set("x", b"1")
    timer = threading.Timer(0.2, lambda: one.set("y", b"2"))
    timer.start()
    assert other.get(["x", "y"], 10.0) == [b"1", b"2"]
    timer.join()


def test_a_get_of_what_never_comes_times_out_and_the_connection_stays_good(key_values):
    one, other = key_values
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="never"):
        other.get(["never"], 0.1)
    assert 0.1 <= time.monotonic() - started < 5
    one.set("x", b"1")
    assert other.get(["x"], 1.0) == [b"1"]


def test_a_wait_does_not_block_other_threads(key_values):
    one, _ = key_values
    waiter = threading.Thread(target=lambda: one.get(["late"], 10.0))
    waiter.start()
    started = time.monotonic()
    one.set("x", b"1")
    assert one.get(["x"], 1.0) == [b"1"]
    assert time.monotonic() - started < 5
    one.set("late", b"")
    waiter.join()


def test_counters_count_and_begin_at_zero(key_values):
    one, other = key_values
    assert [one.add("n", 0), other.add("n", 2), one.add("n", 1)] == [0, 2, 3]


def test_what_is_deleted_is_forgotten(key_values):
    one, other = key_values
    one.set("x", b"1")
    assert one.check("x")  # a set is sent, not awaited: another connection may be heard before it
    other.delete("x")
    other.delete("never was")
    assert not one.check("x")


def test_ranks_may_connect_before_the_leader_serves():
    rendezvous = Rendezvous()
    got = []
    rank = threading.Thread(target=lambda: got.append(connect(rendezvous.address).get(["x"], 20.0)))
    rank.start()
    time.sleep(0.2)
    served = rendezvous.serve()
    served.set("x", b"1")
    rank.join(20)
    assert got == [[b"1"]]


@pytest.mark.skipif(not TCP.exists(), reason="only Linux shows the timers of its connections")
def test_a_silent_connection_is_kept_alive():
    """Firewalls forget one, AWS' own after six minutes, and then a rank would wait for an answer for a quarter of an hour."""
    meeting = Rendezvous()
    leader = meeting.serve()
    rank = connect(meeting.address)
    rank.set("key", b"1")
    assert leader.check("key")
    deadline_s = time.monotonic() + 10
    while not (kept := list(_keepalives_s(meeting.address.port))) or None in kept:  # an answer is still to be acknowledged
        assert time.monotonic() < deadline_s, kept
        time.sleep(0.05)
    assert max(kept) <= 60


def _keepalives_s(port):
    """Yield in how many seconds the kernel probes each connection to `port`, or None (proc_net_tcp in Linux' documentation)."""
    for line in TCP.read_text().splitlines()[1:]:
        _, local, _, state, _, timer, *_ = line.split()
        if local.endswith(f":{port:04X}") and int(state, 16) == 1:
            kind, _, left = timer.partition(":")
            yield int(left, 16) / 100 if int(kind, 16) == 2 else None


def test_two_rendezvous_never_share_a_port():
    both = Rendezvous(), Rendezvous()
    assert both[0].address != both[1].address
    for meeting in both:
        meeting.close()


def test_a_key_that_never_comes_is_named_with_the_whole_wait(key_values, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SOON_S", 0.01)
    with pytest.raises(TimeoutError, match=r"not set within 0\.05 s: port$"):
        wait_for_key(key_values[0], "port", 0.05)


def test_groups_wait_longer_for_each_other_than_a_rank_for_its_leader(monkeypatch):
    monkeypatch.setattr(rendezvous, "_CONNECT_TIMEOUT", timedelta(seconds=1))
    meeting = Rendezvous()
    served = meeting.serve()
    patient, hasty = connect(meeting.address), connect(meeting.address, timeout_s=0.5)
    late = threading.Timer(2, lambda: served.store.set("id of rank 0", b"1"))  # rank 0 imports more than the others
    late.start()
    with pytest.raises(DistStoreError):
        hasty.store.get("id of rank 0")
    assert patient.store.get("id of rank 0") == b"1"
    late.join()


def test_rank_0_may_have_as_many_files_open_as_ranks_connect_to_it(monkeypatch):
    meeting, changed = Rendezvous(), []
    served = meeting.serve()
    monkeypatch.setenv("MASTER_PORT", "")  # it is set
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 100_000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    spec = rank_spec(rank=0, world_size=1000, rendezvous=meeting.address, master_host="127.0.0.1")
    assert GroupStore.open(spec) is not None
    ((soft, hard),) = changed
    assert (soft > 2000, hard) == (True, 100_000)
    assert served.check("port of the process groups")


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("[x/gloo/pair.cc:152] timed out connecting: SO_ERROR: No route to host, remote=[10.0.0.3]:42900$2", "c"),
        ("NCCL error: socketPollConnect: connect to 10.0.0.3<41233> failed : No route to host", "c"),
        ("connect to 10.0.0.30<41233> failed, local=[10.0.0.2]:1", None),
    ],
)
def test_an_address_in_an_error_of_a_rank_that_does_not_reach_another_is_named(text, other):
    machines = {"10.0.0.2": "b", "10.0.0.3": "c"}
    expected = text if other is None else f"machine b does not reach machine {other} at 10.0.0.3: "
    with (
        pytest.raises(RuntimeError, match=f"^{re.escape(expected)}") as caught,
        machines_named(rank_spec(node_name="b", machines=machines)),
    ):
        raise RuntimeError(text)
    assert isinstance(caught.value, DistNetworkError) == (other is not None)


@pytest.mark.parametrize(("reaches_leader", "whose"), [(False, "the flow's machine"), (True, "rank 0's machine")])
def test_a_machine_that_reaches_another_at_no_port_of_its_own_choice_says_which(monkeypatch, reaches_leader, whose):
    """As behind a firewall, which lets the agent's connection pass."""
    monkeypatch.setattr(rendezvous, "_CONNECT_TIMEOUT", timedelta(seconds=1 if reaches_leader else 0.1))
    meeting, closed = Rendezvous(), Address("127.0.0.1", 9)
    served = meeting.serve()
    served.set("port of the process groups", str(closed.port).encode())
    leader = meeting.address if reaches_leader else closed
    spec = rank_spec(rank=1, world_size=2, rendezvous=leader, master_host=closed.host, node_name="b")
    with pytest.raises(
        DistNetworkError, match=f"^machine b does not reach {whose} at 127.0.0.1, port 9: .* a firewall must let pass"
    ):
        GroupStore.open(spec)
    meeting.close()
