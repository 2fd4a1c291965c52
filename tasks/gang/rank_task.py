"""The Prefect task of one rank: supervises its process, logs its output, and ends as the process does."""

import math
import os
import pickle
import signal
import sys
import time
from typing import Any

import cloudpickle
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Failed
from prefect_torch.ckpt.reporting.key_value import KeyValue
from prefect_torch.ckpt.reporting.peers import RankExit, announce_exit
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.failures import CONSEQUENCES, hint_at_death, of_returncode
from prefect_torch.tasks.rank.oom_kills import count_oom_kills
from prefect_torch.tasks.rank.rendezvous import STACK_TRACES_KEY, STOP_KEY, connect, heartbeat_key
from prefect_torch.tasks.rank.spec import RankResult, RankSpec

from .flight_recorder import FlightRecorder
from .process import ProcessExit, RankProcess
from .watch import HEARTBEAT_S

# Not "-m", which looks in the working directory first: a file there named queue.py would be the `queue` of every module.
_RUN = "import sys; sys.path[:] = filter(None, sys.path); import importlib; importlib.import_module(sys.argv[1]).main()"
_POLL_S = 0.1
_SECRETS_OF_PREFECT = {
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_DATABASE_CONNECTION_URL",
    "PREFECT_API_DATABASE_PASSWORD",
    "PREFECT_API_KEY",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    "PREFECT_SERVER_DATABASE_PASSWORD",
}
_STOP_GRACE_S = 3.0
_STACK_TRACES_S = 1.0  # enough to print them
_RECORD_S = 5.0  # NCCL's thread looks at its pipe every second


@task(
    name="train_rank",
    task_run_name="rank-{spec.rank}",
    cache_policy=NO_CACHE,
    persist_result=False,
    # A task without retries logs the failed state, its data and the traceback of no exception.
    retries=1,
    retry_condition_fn=lambda *_: False,
)
def train_rank(spec: RankSpec) -> Any:
    """Run one rank to its end and return what its function returned (rank 0; None on the others).

    The process's output becomes this task run's log, line by line. The process cannot outlive this one. When the attempt
    is over because another rank failed, the process is killed and this task run is cancelled.

    Raises:
        RankFailedError: With the rank's traceback, exit code or signal; the failed state has the same message. If another rank
            caused the failure, the state is Cancelled.

    """
    command = [sys.executable, "-u", "-c", _RUN, "prefect_torch.tasks.rank.main"]
    oom_kills = count_oom_kills()
    recorder = FlightRecorder(spec.rank) if spec.records_collectives else None
    environment = {**_environment(spec), **({} if recorder is None else recorder.environment)}
    process = RankProcess(command, environment, cloudpickle.dumps(spec), spec.gpu_locks[spec.local_rank : spec.local_rank + 1])
    try:
        key_value = connect(spec.rendezvous)
        stopped = _supervise(process, key_value, spec.rank, recorder)
    finally:
        process.kill()
        process_exit = process.reap()
        if recorder is not None and (record := recorder.close()) is not None:
            get_run_logger().warning("the rank's last collectives are in %s: read that of all ranks with torchfrtrace", record)
    if stopped is not None:
        return Cancelled(message=stopped)
    result = rank_result(process_exit, oom_kills, count_oom_kills())
    if result.kind is not None:
        # The rank may have announced it; if its process died, it has not.
        announce_exit(key_value, RankExit(spec.rank, None, "died", result.error))
        return _failed(spec, result)
    return None if result.return_value is None else _load_value(result.return_value)


def _environment(spec: RankSpec) -> dict[str, str]:
    """Return this process's environment without the secrets of Prefect's API; only a storage from a block may need them."""
    comes_from_block = spec.storage.credential_source is not None
    kept = {name: value for name, value in os.environ.items() if comes_from_block or name not in _SECRETS_OF_PREFECT}
    return {**kept, **spec.environment()}


def _load_value(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301 - from our own process
    except Exception as exc:  # noqa: BLE001 - a finished training must not fail for its return value
        get_run_logger().warning("the return value is dropped, since it cannot be rebuilt here: %r", exc)
        return None


def _supervise(process: RankProcess, key_value: KeyValue, rank: int, recorder: FlightRecorder | None) -> str | None:
    """Log lines until the process has exited; return why it was stopped, or None if it exited by itself."""
    logger = get_run_logger()
    reason: str | None = None
    heartbeat_at_s, terminate_at_s, kill_at_s = 0.0, math.inf, math.inf
    for lines in process.lines(_POLL_S):
        for line in lines:
            logger.info("%s", line)
        now_s = time.monotonic()
        if now_s >= heartbeat_at_s:
            key_value.add(heartbeat_key(rank), 1)
            heartbeat_at_s = now_s + HEARTBEAT_S
        if reason is None and key_value.check(STOP_KEY):
            reason = key_value.get([STOP_KEY], 0.0)[0].decode()
            terminate_at_s = now_s
            if key_value.check(STACK_TRACES_KEY):
                process.write_stack_traces()
                is_recording = recorder is not None and recorder.request()
                terminate_at_s += _RECORD_S if is_recording else _STACK_TRACES_S
        if now_s >= terminate_at_s:
            process.terminate()
            terminate_at_s, kill_at_s = math.inf, now_s + _STOP_GRACE_S
        if now_s >= kill_at_s:
            process.kill()
    return reason


def rank_result(process_exit: ProcessExit, oom_kills_before: int | None, oom_kills: int | None) -> RankResult:
    """Return the result that a rank left, or one made from the exit status of its process.

    Args:
        process_exit: How the process exited.
        oom_kills_before: How many processes the kernel had killed for lack of memory when it started; None if unknown.
        oom_kills: How many it has killed by now; None if unknown.

    """
    if process_exit.message:
        result: RankResult = pickle.loads(process_exit.message)  # noqa: S301 - from our own process
        return result
    oom_killed = None if oom_kills is None else oom_kills > (oom_kills_before or 0)
    kind = of_returncode(process_exit.returncode, oom_killed=bool(oom_killed))
    hint = hint_at_death(process_exit.returncode, oom_killed=oom_killed)
    return RankResult(kind=kind, error=f"{_death(process_exit.returncode)}{hint}")


def _death(returncode: int | None) -> str:
    if returncode is None:
        return "its process and the guard of it were killed"
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"
        return f"its process was killed by {name} ({-returncode})"
    return f"its process exited with code {returncode} before the training function returned"


def _failed(spec: RankSpec, result: RankResult) -> State[Any]:
    """Return the final state; a raised error would be logged with the traceback of the supervisor."""
    error = _error(spec, result)
    if error.kind in CONSEQUENCES:
        return Cancelled(message=f"stopped: {result.error}", data=error)
    return Failed(message=str(error), data=error)


def _error(spec: RankSpec, result: RankResult) -> RankFailedError:
    assert result.kind is not None
    original = None
    if result.exception is not None:
        try:
            original = pickle.loads(result.exception)  # noqa: S301 - from our own process
        except Exception:  # noqa: BLE001 - its module cannot be imported here; the text has the traceback
            original = None
    message = f"rank {spec.rank} of {spec.group} failed: {result.error}"
    return RankFailedError(
        message, spec.rank, result.kind, original if isinstance(original, Exception) else None, result.traceback
    )
