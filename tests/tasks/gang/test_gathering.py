"""What the leader says of machines that do not come."""

import time

from prefect_torch.tasks import Hosts
from prefect_torch.tasks.gang.engines.cluster import MachineRequest
from prefect_torch.tasks.gang.machine import gathering as gathering_module
from prefect_torch.tasks.gang.machine.gathering import gather


def test_a_command_that_brings_no_agent_is_quoted(monkeypatch):
    """As that of an srun, which waits in the queue and says so."""
    monkeypatch.setattr(gathering_module, "_START_S", 0.01)
    command = "echo queued and waiting for resources; sleep 600 #"
    cluster = Hosts(["a"], command=command, leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering:
        deadline_s = time.monotonic() + 60
        while not gathering._commands[0][0].last_lines:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not gathering.wait(lambda: None)
        assert gathering.missing() == ["a: its agent did not come within 0.01 s: queued and waiting for resources"]
