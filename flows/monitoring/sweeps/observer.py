"""The observer of a sweep: it shows the sweep in Prefect's UI and at a terminal, in a thread of its own."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import UUID

from prefect_torch.flows.monitoring.pages.live_artifact import LiveArtifact, artifact_key
from prefect_torch.flows.monitoring.text import plain_text
from prefect_torch.flows.sweeps.journal.history import History
from prefect_torch.tasks.prefect_api.client import LazyClient
from prefect_torch.tasks.prefect_api.flow_run import has_run_before
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.run_logs import get_run_logger
from prefect_torch.tasks.training.backoff import LONGEST_PAUSE_S, Backoff

from .page import SweepContext, write_sweep
from .trial_table import TrialTable
from .view import SweepView

if TYPE_CHECKING:
    from typing_extensions import Self

_LOOK_S = 2.0
_PAUSE_PER_READ = 9.0  # seconds for each second of a look's reads, which are of all that the running trials have reported
_REQUEST_S = 15.0
_LONGEST_CLOSE_S = 20.0


class SweepObserver:
    """Shows a sweep while its context is entered; a storage or a server that does not answer never delays a trial.

    The page is an artifact of the sweep's flow run with the key `<sweep>-<digest>-sweep`, created once by each flow run and
    updated with the backoff of a training's pages.

    Args:
        view: The view of the sweep.
        trials: Returns the trials as the journal has them.
        context: What is shown beside them.
        flow_run_id: The flow run that leads the sweep.
        table: Shows the trials at a terminal; None if there is none.

    """

    def __init__(
        self,
        view: SweepView,
        trials: Callable[[], History],
        context: SweepContext,
        flow_run_id: UUID | None,
        table: TrialTable | None = None,
    ) -> None:
        self._view = view
        self._trials = trials
        self._context = context
        self._flow_run_id = flow_run_id
        self._table = table
        self._backoff = Backoff()
        self._pause_s = _LOOK_S
        key = f"{artifact_key(view.run.name, view.run.path)}-sweep"
        self._artifact = LiveArtifact(key, "markdown", may_exist=has_run_before())
        self._client = LazyClient(_REQUEST_S)
        self._has_warned = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="sweep-observer", daemon=True)

    def __enter__(self) -> "Self":
        """Begin to show the sweep."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Show how the sweep has ended, which takes 20 s at most."""
        state = "completed" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
        self._context = replace(self._context, state=state)
        self._is_closing.set()
        self._thread.join(_LONGEST_CLOSE_S)

    def _run(self) -> None:
        while not self._is_closing.wait(self._pause_s):
            self._look(final=False)
        self._look(final=True)
        self._client.close()

    def _look(self, *, final: bool) -> None:
        try:
            self._refresh(final=final)
        except Exception as exc:  # noqa: BLE001 - whatever fails here, the sweep continues
            if not self._has_warned:
                get_run_logger().warning("the page of the sweep is not up to date: %r; the sweep continues", exc)
            self._has_warned = True
        finally:
            if final and self._table is not None:
                self._table.close()

    def _refresh(self, *, final: bool) -> None:
        self._view.record(self._trials())
        is_due = final or self._backoff.wait_s() <= 0
        if is_due or self._table is not None:
            self._read()
        if self._table is not None:
            self._table.show(self._view)
            if final:
                self._table.close()  # before a publication that may be tried for minutes
        if is_due:
            self._backoff.record()
            self._publish(final=final)

    def _read(self) -> None:
        began_s = time.monotonic()
        self._view.read()
        self._pause_s = min(max(_LOOK_S, _PAUSE_PER_READ * (time.monotonic() - began_s)), LONGEST_PAUSE_S)

    def _publish(self, *, final: bool) -> None:
        page = write_sweep(self._view, self._context, time.time())
        about = f"Sweep {plain_text(self._view.run.name)}: trials, curves, parameters"
        news = [self._view.trials(), self._context.state]
        with nullcontext() if final else without_retries():  # the next publication tries again
            self._artifact.show(self._client.open(), self._flow_run_id, page, about, news)
