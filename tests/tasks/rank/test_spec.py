"""The variables of a rank, beside those of a real torchrun."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from prefect_torch.ckpt import StorageSpec
from prefect_torch.tasks.rank.main import _unpack
from prefect_torch.tasks.rank.rendezvous import Address
from prefect_torch.tasks.rank.spec import RankSpec, on_machines
from prefect_torch.tasks.rank.tracebacks import user_traceback
from prefect_torch.tasks.rank.user_code.function import PackedFunction

LEFT_OUT = {
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}


def first_rank(**more):
    return RankSpec(
        world_size=1,
        local_world_size=1,
        rendezvous=Address("127.0.0.1", 1234),
        storage=StorageSpec("/nowhere"),
        run="run",
        function=PackedFunction("module:function", b"", (), "/", "function"),
        restored=None,
        use_gpu=False,
        backend=None,
        **{"attempt": 1, **more},
    )


def test_a_rank_has_the_variables_that_torchrun_sets():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python", "env", "-0"]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, check=True, text=True, timeout=100).stdout
    of_torchrun = dict(line.split("=", 1) for line in printed.split("\0") if "=" in line)
    ours = first_rank().environment()
    names = {name for name in of_torchrun if name not in environment and not name.startswith(("LC_", "KMP_"))}
    assert "ROLE_RANK" in names
    assert not LEFT_OUT & set(ours)
    assert LEFT_OUT - {"TORCHELASTIC_SIGNALS_TO_HANDLE"} <= names - set(ours) <= LEFT_OUT  # torch 2.9 does not set that one
    own_ports = {"MASTER_ADDR", "MASTER_PORT"}
    assert {name: ours[name] for name in names - LEFT_OUT - own_ports} == {
        name: of_torchrun[name] for name in names - LEFT_OUT - own_ports
    }


@pytest.mark.parametrize("master_host", ["10.0.0.1", None])
@pytest.mark.parametrize("reference", ["no_such_module:train", "no_such_file.py:train"])
def test_code_that_one_of_several_machines_lacks_can_be_brought_there(tmp_path, reference, master_host):
    function = replace(first_rank().function, reference=reference, payload=pickle.dumps((None, {})))
    spec = first_rank(master_host=master_host, node_name="b")
    with pytest.raises((ModuleNotFoundError, FileNotFoundError)) as caught:
        _unpack(spec, function)
    text = user_traceback(caught.value)
    assert reference.split(":")[0] in text
    has_note = master_host is not None and sys.version_info >= (3, 11)
    assert ("this is machine b:" in text and "`working_dir`" in text) is has_note


def test_ranks_of_uneven_machines_are_numbered_in_their_order():
    names = (
        "RANK",
        "ROLE_RANK",
        "GROUP_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
    )
    variables = [spec.environment() for spec in on_machines(first_rank(attempt=3), (2, 1))]
    assert [tuple(rank[name] for name in names) for rank in variables] == [
        ("0", "0", "0", "0", "2", "3", "2"),
        ("1", "1", "0", "1", "2", "3", "2"),
        ("2", "2", "1", "0", "1", "3", "2"),
    ]
