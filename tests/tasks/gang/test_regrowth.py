"""Asking a cluster for more machines while an attempt runs; the agents are real processes on this machine."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from agents import agents
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.tasks import Hosts, ScalingConfig
from prefect_torch.tasks.gang import gang_run
from prefect_torch.tasks.gang.engines.agent_process import AGENT
from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.gang.gang import Gang
from prefect_torch.tasks.gang.gang_run import GangRun
from prefect_torch.tasks.gang.machine import regrowth as regrowth_module
from prefect_torch.tasks.gang.machine.agent import KEY_VARIABLE
from prefect_torch.tasks.gang.machine.regrowth import Regrowth
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.rank.rendezvous import TERMINATION_KEY
from pydantic import ValidationError

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def agents_prepare_nothing(monkeypatch):
    """Have agents import no torch for ranks, which nobody starts here."""
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_FORK_RANKS", "false")


def wait_for(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_machines_are_held_as_soon_as_the_cluster_has_some_that_are_not_in_use(tmp_path):
    asked = []

    def wanted(gone):
        asked.append(1)
        return MachineRequest(1, 2, use_gpu=False, avoid=frozenset({"a"}), in_use=frozenset({"a"}))

    (tmp_path / "a").touch()
    cluster = Hosts(["a", "b"], command=f"test -e {tmp_path}/{{host}} && exec {{agent}}", leader_address=LOOPBACK)
    regrowth = Regrowth(cluster, wanted, 0.01)
    try:
        wait_for(lambda: len(asked) > 1)
        assert regrowth.room == 0
        (tmp_path / "b").touch()
        wait_for(lambda: regrowth.room)
        assert regrowth.room == 2, "the only machine that is left takes all ranks"
        assert len(agents()) >= 1
    finally:
        regrowth.stop()
    assert not agents()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_attempt_goes_on_if_what_was_lent_is_gone_before_its_checkpoint_and_others_are_asked_for(
    tmp_path, monkeypatch, number
):
    monkeypatch.setattr(gang_run, "get_run_logger", lambda: logging.getLogger("gang"))
    avoid = {"a"}

    def wanted(gone):
        avoid.update(machine.name for machine in gone)
        return MachineRequest(1, 1, use_gpu=False, avoid=frozenset(avoid), in_use=frozenset({"a"}))

    (tmp_path / "b").touch()
    cluster = Hosts(["a", "b", "c"], command=f"test -e {tmp_path}/{{host}} && exec {{agent}}", leader_address=LOOPBACK)
    regrowth = Regrowth(cluster, wanted, 0.01)
    try:
        key_value = MemoryKeyValue()
        run = GangRun(Gang([], None), key_value, None, Termination(0.0), regrowth)
        wait_for(lambda: regrowth.room)
        run._regrow()
        assert key_value.check(TERMINATION_KEY)
        (agent,) = agents()
        os.kill(agent.pid, number)
        wait_for(lambda: not regrowth.room)
        run._regrow()
        assert not key_value.check(TERMINATION_KEY)
        (tmp_path / "c").touch()
        wait_for(lambda: regrowth.room)
        assert [machine.name for machine in regrowth.machines] == ["c"]
        run._regrow()
        assert key_value.check(TERMINATION_KEY)
    finally:
        regrowth.stop()
    assert not agents()


class Counted(Cluster):
    """A cluster that starts its agents itself, two ranks each, and lends what is left of the machines that a file counts."""

    kind: Literal["counted"] = "counted"
    file: str

    @contextmanager
    def lend(self, wanted, agents):
        names = {f"m{number}" for number in range(int(Path(self.file).read_text()))} - wanted.avoid
        started = []
        for name in sorted(names):
            command = [sys.executable, "-m", AGENT, *agents.arguments(name, 2)]
            agents.expect(name)
            started.append(subprocess.Popen(command, env={**os.environ, KEY_VARIABLE: agents.key}))
        try:
            yield
        finally:
            for agent in started:
                agent.kill()
                agent.wait()


def test_an_engine_that_knows_nothing_of_regrowth_is_asked_like_any_other(tmp_path):
    """It starts agents in its own way, and lends more as soon as it has more."""
    counted = tmp_path / "machines"
    counted.write_text("1")
    asked = []

    def wanted(gone):
        asked.append(1)
        return MachineRequest(1, 4, use_gpu=False, avoid=frozenset({"m0"}), in_use=frozenset({"m0"}))

    regrowth = Regrowth(Counted(file=str(counted), leader_address=LOOPBACK), wanted, 0.01)
    try:
        wait_for(lambda: len(asked) > 1)
        assert regrowth.room == 0
        (tmp_path / "more").write_text("3")
        (tmp_path / "more").rename(counted)
        wait_for(lambda: regrowth.room)
        assert regrowth.room == 4
    finally:
        regrowth.stop()
    assert not agents()


def test_a_cluster_that_cannot_be_asked_is_asked_again(monkeypatch, caplog):
    monkeypatch.setattr(regrowth_module, "get_run_logger", lambda: logging.getLogger("regrowth"))

    def wanted(gone):
        raise OSError("no answer")

    regrowth = Regrowth(Hosts(["a"]), wanted, 0.01)
    wait_for(lambda: caplog.text.count("more machines: no answer") > 1)
    regrowth.stop()
    assert regrowth.room == 0


def test_growth_is_refused_where_the_number_of_ranks_is_fixed():
    with pytest.raises(ValidationError, match=r"give num_workers=\(fewest, most\)"):
        ScalingConfig(num_workers=2, regrow_after_s=60)
