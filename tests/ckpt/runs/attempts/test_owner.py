import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from prefect_torch.ckpt.runs.attempts.owner import Owner, SlurmStart, _start_ticks


def test_a_process_is_no_earlier_process_of_itself():
    here = Owner.current("flow")
    earlier = replace(here, pid=here.pid + 1)
    assert earlier.is_earlier_process_of(here)
    assert not here.is_earlier_process_of(here)
    assert not replace(earlier, flow_run_id="other").is_earlier_process_of(here)
    assert replace(earlier, slurm_start=SlurmStart("main/7", 0)).is_earlier_process_of(here)


def test_this_process_is_alive_and_an_ended_one_is_dead():
    assert Owner.current().is_process_gone() is False
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = replace(Owner.current(), pid=child.pid, started=0)
        assert owner.is_process_gone() is True  # a reused pid is another process
    assert replace(Owner.current(), pid=child.pid).is_process_gone() is True


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_process_whose_name_is_cut_within_a_character_is_alive():
    libc, name = ctypes.CDLL(None), Path("/proc/self/comm").read_bytes().strip()
    libc.prctl(15, b"entra\xc3", 0, 0, 0)  # PR_SET_NAME
    try:
        assert Owner.current().is_process_gone() is False
    finally:
        libc.prctl(15, name, 0, 0, 0)


def test_a_dead_process_that_nobody_has_waited_for_is_gone():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        owner = replace(Owner.current(), pid=child.pid, started=_start_ticks(child.pid))
        assert owner.is_process_gone() is False
        assert replace(owner, started=None).is_process_gone() is False, "it was hidden when the owner was recorded"
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert owner.is_process_gone() is True


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_process_that_the_kernel_hides_may_be_alive(monkeypatch, error):
    """With hidepid, /proc does not show the processes of other users."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        owner = replace(Owner.current(), pid=child.pid, started=_start_ticks(child.pid))
        monkeypatch.setattr("prefect_torch.ckpt.runs.attempts.owner._start_ticks", Mock(side_effect=error))
        assert owner.is_process_gone() is False
        child.stdin.close()
        child.wait()
        assert owner.is_process_gone() is True


def test_a_process_of_another_machine_may_be_alive():
    assert replace(Owner.current(), host="elsewhere/boot", pid=os.getpid()).is_process_gone() is None


@pytest.mark.parametrize(
    ("job", "num_before", "is_gone"),
    [("7", None, True), ("7", "1", True), ("7", "2", None), ("7", "3", None), ("8", None, None), (None, None, None)],
)
def test_a_process_of_an_earlier_start_of_this_slurm_job_is_gone(monkeypatch, job, num_before, is_gone):
    """Its machine may have failed, with nobody left to tell its end; Slurm has given it up."""

    def begin(job, num_before):
        for name, value in {"CLUSTER_NAME": "main", "JOB_ID": job, "RESTART_COUNT": num_before}.items():
            if value is None:
                monkeypatch.delenv(f"SLURM_{name}", raising=False)
            else:
                monkeypatch.setenv(f"SLURM_{name}", value)

    begin(job, num_before)
    before = Owner.current("flow")
    elsewhere = replace(before, host="elsewhere/boot")
    begin("7", "2")
    assert elsewhere.is_process_gone() is is_gone
    assert before.is_process_gone() is False, "this process is alive, whatever Slurm says"
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "other")
    assert elsewhere.is_process_gone() is None
    begin(None, None)
    assert elsewhere.is_process_gone() is None


UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc"]
TELL_OWNER = """
import json
from dataclasses import asdict
from prefect_torch.ckpt.runs.attempts.owner import Owner
print(json.dumps(asdict(Owner.current())), flush=True)
input()
"""


def test_a_process_of_another_container_with_our_name_and_boot_may_be_alive():
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine makes no pid namespaces: it takes root, and unshare")
    with subprocess.Popen(
        [*UNSHARE, sys.executable, "-c", TELL_OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as container:
        there, here = Owner(**json.loads(container.stdout.readline())), Owner.current()
        assert there.machine == here.machine
        assert there.host != here.host
        assert there.is_process_gone() is None
        assert here.is_process_gone() is False
        container.communicate("\n")


def test_an_owner_that_version_0_1_wrote_is_judged_by_its_machine():
    """It named no pid namespace."""
    owner = Owner.current()
    if owner.host.count("/") < 2:
        pytest.skip("no pid namespaces outside of Linux")
    before = replace(owner, host=owner.host.rpartition("/")[0])
    assert before.is_process_gone() is False
    assert replace(before, started=0).is_process_gone() is True
