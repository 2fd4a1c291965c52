"""Tells of a sweep that waits since nothing takes the flow runs of its trials: their work pool has no worker, say."""

from collections.abc import Iterable
from datetime import datetime, timezone

from prefect.client.schemas.objects import FlowRun
from prefect_torch.ckpt.text import show_count

_LONG_S = 60.0
_FOR_ANY_WORKER = ("Scheduled", "Late")  # and not those that wait for a retry or a slot, were resumed, or give way


class Untaken:
    """Tells once of each time in which nothing takes flow runs for a minute, while no other one of the sweep has been taken.

    Those that wait beside others wait for these, as for a place in a work pool with a limit.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._is_told = False

    def warning(self, flow_runs: Iterable[FlowRun], now_s: float) -> str | None:
        """Return what is to be told now; None if nothing is.

        Args:
            flow_runs: The flow runs of all trials that run.
            now_s: The time by this machine's clock, in seconds.

        """
        known = list(flow_runs)
        waiting = [flow_run for flow_run in known if _is_untaken(flow_run)]
        if not waiting or any(map(_is_taken, known)):
            self._since_s, self._is_told = None, False
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        if self._is_told or now_s < self._since_s + _LONG_S:
            return None
        self._is_told = True
        count, first = show_count(len(waiting), "flow run"), waiting[0]
        return f"no trial runs, and nothing has taken {count}, such as {first.name!r}, for a minute: {_remedy(first)}"


def _is_untaken(flow_run: FlowRun) -> bool:
    state = flow_run.state
    if state is None or state.name not in _FOR_ANY_WORKER:
        return False
    due = state.state_details.scheduled_time
    return due is None or due <= datetime.now(timezone.utc)


def _is_taken(flow_run: FlowRun) -> bool:
    return flow_run.state is not None and (flow_run.state.is_pending() or flow_run.state.is_running())


def _remedy(flow_run: FlowRun) -> str:
    pool, queue = flow_run.work_pool_name, flow_run.work_queue_name
    if pool is None:
        return "start the process that serves the deployment"
    return (
        f"start a worker of work pool {pool!r}, or resume the pool or its queue {queue!r} if that is paused, or wait if other "
        "flow runs use up a limit"
    )
