"""A referee from outside kills trainings where they touch files; tests/benchmarks/results/chaos.txt is its whole table."""

import os
import sys
from pathlib import Path

import pytest
from forked_programs import run_program
from prefect.settings import PREFECT_API_URL

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NEVER_SYNCED = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import chaos
from prefect_torch.ckpt.storage.local_files import root_folder, storage, syncing
class NeverSyncs:
    def __getattr__(self, name):
        return getattr(os, name) if name != "fsync" else lambda descriptor: None
root_folder.os = storage.os = syncing.os = NeverSyncs()
sys.exit(chaos.main())
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info < (3, 11),
    reason="needs /proc and subreapers, and a pathlib that looks functions of os up when it calls them",
)


def judge(scratch, *arguments):
    """Run the referee and return its exit code and what it printed."""
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value(), "TMPDIR": str(scratch)}
    done = run_program([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=290)
    return done.returncode, done.stdout + done.stderr


def total(printed):
    """Return the last row of its table: points, then how many of them ended in each kind of failure."""
    row = next(line for line in printed.splitlines() if line.startswith("total"))
    return [int(word) for word in row.split()[1:]]


@pytest.mark.timeout(300)
def test_a_training_killed_at_a_file_event_loses_nothing_and_ends_with_the_same_bits(tmp_path):
    code, printed = judge(tmp_path, str(BENCHMARKS / "chaos.py"), "--quick")
    assert code == 0, printed[-6000:]
    assert total(printed) == [18, 0, 0, 0, 0]


@pytest.mark.timeout(300)
def test_the_referee_sees_a_storage_that_never_syncs_its_files(tmp_path):
    """Else its zeros would mean nothing. Only a cut of power tells such a storage from others, at two of three points."""
    ways = ("--ranks", "1", "--how", "cut", "--every", "23", "--flow-points", "0")
    code, printed = judge(tmp_path, "-c", NEVER_SYNCED, *ways)
    assert code == 1, printed[-6000:]
    assert sum(total(printed)[1:]) > 0
