"""The Prefect task of the ranks of one machine, where there are too many ranks for a task run each."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit
from prefect_torch.tasks.rank.failures import cause_of
from prefect_torch.tasks.rank.rendezvous import WITHIN_LEADER, connect
from prefect_torch.tasks.rank.spec import RankSpec

from .rank_groups import RankGroup
from .rank_logs import RankLog, RankLogs
from .rank_task import Heartbeat, Machine, run_rank
from .stop_order import StopOrder

if TYPE_CHECKING:
    from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue


@task(
    name="train_node",
    task_run_name="node-{group.node}: ranks {group}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=1,  # as for `train_rank`
    retry_condition_fn=lambda *_: False,
)
def train_node(group: RankGroup, machine: Machine | None, logs: RankLogs | None, stop: StopOrder) -> Any:
    """Run several ranks of one machine to their ends, as `train_rank` runs one; each line in the log has its rank's number.

    Args:
        group: The ranks.
        machine: The machine; None for this one.
        logs: Where their lines go; None for all to Prefect.
        stop: Whether they are to be stopped.

    Raises:
        RankFailedError: The error of the rank that failed first, as far as that is known.

    """
    connected: Future[KeyValue] = Future()
    heartbeat = Heartbeat(connected.result, group.ranks[0])
    with ThreadPoolExecutor(len(group.specs), "ranks") as pool, heartbeat.kept_up():

        def run(spec: RankSpec) -> Any:
            prefix = f"rank {spec.rank}: "
            log = RankLog(spec.rank, prefix=prefix) if logs is None else logs.of(spec, prefix)
            try:
                return run_rank(spec, machine, stop, heartbeat, log)
            except BaseException as exc:  # the machine's other ranks would wait for this one, unnoticed
                announce_exit(connected.result(), RankExit(spec.rank, None, "died", repr(exc)))
                raise

        try:  # also if no thread can be started for a rank: those of the others wait for `connected`
            running = [pool.submit(copy_context().run, run, spec) for spec in group.specs]
            connected.set_result(connect(group.specs[0].rendezvous, tries_for=WITHIN_LEADER))
        except BaseException as exc:
            connected.set_exception(exc)
            raise
    return _combine(ended.result() for ended in running)


def _combine(outcomes: Iterable[Any]) -> State[Any] | None:
    """Return the state of the rank that failed first, else that of a stopped rank; None if all returned."""
    states = [outcome for outcome in outcomes if isinstance(outcome, State)]
    failures = [state.data for state in states if isinstance(state.data, BaseException)]
    cause = cause_of(failures) if failures else None
    return next((state for state in states if cause is not None and state.data is cause), next(iter(states), None))
