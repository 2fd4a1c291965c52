"""A rank on this machine: its process, the record of its collectives, and what it leaves."""

import os
import pickle
from collections.abc import Iterator

import cloudpickle
from prefect_torch.tasks.options.settings import TorchSettings
from prefect_torch.tasks.rank.resources.cpus import default_threads
from prefect_torch.tasks.rank.resources.oom_kills import OomKills
from prefect_torch.tasks.rank.resources.open_files import allow_open_files
from prefect_torch.tasks.rank.spec import RankResult, RankSpec
from prefect_torch.tasks.run_logs import get_run_logger

from .flight_recorder import FlightRecorder
from .fork_servers import FORK_SERVERS, RANK_PROGRAM, python_command
from .process import ProcessExit, RankProcess
from .rank_exit import result_left, result_of_exit
from .secret_variables import SECRETS_OF_PREFECT


class LocalRank:
    """A rank as a child of this process."""

    def __init__(self, spec: RankSpec) -> None:
        self._oom_kills = OomKills()
        environment = _environment(spec)
        self._recorder = FlightRecorder(spec.rank, environment) if spec.records_collectives else None
        if self._recorder is not None:
            environment.update(self._recorder.environment)
        try:
            self._process = RankProcess(
                python_command(RANK_PROGRAM),
                environment,
                cloudpickle.dumps(spec),
                spec.gpu_locks[spec.local_rank : spec.local_rank + 1],
                FORK_SERVERS.find(environment) if TorchSettings().fork_ranks else None,
            )
        except BaseException:
            if self._recorder is not None:
                self._recorder.close()
            raise

    def lines(self, poll_s: float) -> Iterator[list[str]]:
        """Yield the lines written since the last yield, at least every `poll_s`, until the process exits."""
        return self._process.lines(poll_s)

    def wake(self) -> None:
        """Do nothing: `lines` always yields every `poll_s`."""

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._process.terminate()

    def write_stack_traces(self) -> bool:
        """Have the process print its stack traces, and return whether NCCL writes a record as well, which takes seconds."""
        self._process.write_stack_traces()
        return self._recorder is not None and self._recorder.request()

    def kill(self) -> None:
        """Kill the process and all its descendants (SIGKILL)."""
        self._process.kill()

    def finish(self) -> RankResult:
        """Kill what is left of the process, and return how it ended."""
        process_exit = self._process.reap()
        if self._recorder is not None and (record := self._recorder.close()) is not None:
            get_run_logger().warning("the rank's last collectives are in %s: read that of all ranks with torchfrtrace", record)
        return rank_result(process_exit, oom_killed=self._oom_kills.happened())


def prepare_ranks(num_ranks: int) -> None:
    """Start the server that forks the ranks of this machine, unless it runs, without waiting for it.

    Args:
        num_ranks: How many ranks this machine will have at a time.

    Raises:
        OSError: If this process may have so few files open that a training would hang.

    """
    allow_open_files(1, num_ranks)
    if TorchSettings().fork_ranks:
        FORK_SERVERS.find(default_threads(num_ranks) | dict(os.environ))


def rank_result(process_exit: ProcessExit, *, oom_killed: bool | None) -> RankResult:
    """Return the result that a rank left, or one made from the exit status of its process.

    Args:
        process_exit: How the process exited.
        oom_killed: Whether the kernel has killed a process for lack of memory while it ran; None if unknown.

    """
    result = result_left(process_exit.message, process_exit.returncode, pickle.loads)
    return result or result_of_exit(process_exit.returncode, oom_killed=oom_killed)


def _environment(spec: RankSpec) -> dict[str, str]:
    """Return this process's environment without the secrets of Prefect's API; only a storage from a block may need them."""
    comes_from_block = any(storage.credential_source is not None for storage in spec.storages)
    kept = {name: value for name, value in os.environ.items() if comes_from_block or name not in SECRETS_OF_PREFECT}
    return default_threads(max(spec.local_world_size, spec.ranks_at_once)) | kept | spec.environment()
