"""The limit of open files, which a process raises for its ranks."""

import resource
import subprocess
import sys

import pytest
from prefect_torch.tasks.rank.resources.open_files import allow_open_files

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "ranks", "raised"),
    [
        ((1024, 4096), 8, None),
        ((1024, 100_000), 512, (4736, 100_000)),
        ((1024, 4096), 512, (4096, 4096)),
        ((1024, UNLIMITED), 512, (4736, UNLIMITED)),
        ((UNLIMITED, UNLIMITED), 512, None),
        ((50_000, 100_000), 512, None),
    ],
)
def test_it_is_raised_to_what_the_ranks_need_and_no_further_than_the_system_lets_it(monkeypatch, limits, ranks, raised):
    changed = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    allow_open_files(1, ranks)
    assert changed == ([] if raised is None else [raised])


@pytest.mark.parametrize(("limit", "fewest"), [(63, 2), (1024, 1025)])
def test_with_too_few_no_training_starts(monkeypatch, limit, fewest):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(OSError, match=f"may have {limit} files and sockets open, too few for a training of {fewest} ranks"):
        allow_open_files(fewest, 2000)


@pytest.mark.parametrize(("limit", "fewest"), [(64, 2), (1024, 2)])
def test_with_as_many_as_the_fewest_ranks_need_it_starts(monkeypatch, limit, fewest):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    allow_open_files(fewest, 2000)


def test_more_ranks_connect_to_their_leader_than_its_process_could_have_files_open():
    """In a process of its own, whose limit is lowered."""
    program = (
        "import resource, sys\n"
        "from datetime import timedelta\n"
        "from prefect_torch.tasks.rank.rendezvous import Rendezvous, connect\n"
        "from prefect_torch.tasks.rank.resources.open_files import allow_open_files\n"
        "meeting = Rendezvous()\n"
        "leader = meeting.serve()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "allow_open_files(1, 60)\n"
        "ranks = [connect(meeting.address, tries_for=timedelta(seconds=60)) for _ in range(60)]\n"
        "ranks[-1].set('key', b'1')\n"
        "assert leader.get(['key'], 60) == [b'1']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
