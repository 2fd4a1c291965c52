"""The page of a storage: its runs side by side, refreshed at the end of each training and by the flow `prune`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from prefect_torch.ckpt import CheckpointStore, Storage, StorageSpec
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.errors import CheckpointError
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus, read_status
from prefect_torch.ckpt.runs.history import MetricRecord, read_history
from prefect_torch.ckpt.runs.metrics import numbers_in
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.parallel import for_each, read_all
from prefect_torch.ckpt.storage.specs.location import canonical
from prefect_torch.ckpt.text import as_command, show_count
from prefect_torch.flows.monitoring.pages.drawing.curves import Point, finite_values
from prefect_torch.flows.monitoring.pages.drawing.sparkline import draw_sparkline
from prefect_torch.flows.monitoring.pages.drawing.svg import as_data_url
from prefect_torch.flows.monitoring.text import (
    flow_run_page,
    link_text,
    plain_text,
    seconds_of,
    shorten,
    show_number,
    show_time,
)
from prefect_torch.flows.sweeps.definition import read_definition
from prefect_torch.flows.sweeps.journal.history import score_of
from prefect_torch.flows.sweeps.journal.stored_trials import read_known_trials
from prefect_torch.tasks.prefect_api.settings import settings_with, using
from prefect_torch.tasks.run_logs import get_run_logger

from .live_artifact import add_version, artifact_key

_MAX_RUNS = 500  # whose newest attempt is read: of more, the last by name, since many names begin with a date
_MAX_ROWS = 50  # whose metrics are read, too
_ROWS_AT_ONCE = 4  # each holds all records of its run, a million of a long one, and reads them in 32 threads
# Characters: longer ones push the columns of all runs below the UI's sidebar, and names that no hyphen breaks do it earlier.
_LONGEST_NAME, _LONGEST_WORD, _LONGEST_METRIC = 60, 30, 30
_RETRIES = 2  # after 2 s and 4 s: the flow has waited for an API that is away already, and Prefect's 7 take four minutes more
_LONGEST_S = 10.0  # for reading metrics; the rows that are left have no curve


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run among the others of its storage.

    Attributes:
        name: Its name.
        status: Its newest attempt.
        step: The step of its last report since its last fresh start; None without reports, or if they were not read.
        metric: The score, or the first metric that is a number if no report has the score; None without one.
        best: The best value of the score, or the last of another metric.
        points: The curve of that metric.
        num_trials: The number of a sweep's trials; None for a training.

    """

    name: str
    status: AttemptStatus
    step: int | None = None
    metric: str | None = None
    best: float | None = None
    points: tuple[Point, ...] = ()
    num_trials: int | None = None


def refresh_runs_page(storage: StorageSpec, *, in_place: bool = False) -> None:
    """Publish the page of `storage` from a flow run, as `publish_runs` does; a failure is logged, and the flow continues."""
    retries = min(_RETRIES, PREFECT_CLIENT_MAX_RETRIES.value())
    try:
        with using(settings_with({PREFECT_CLIENT_MAX_RETRIES: retries})), get_client(sync_client=True) as client:
            brief = replace(storage, retry=replace(storage.retry, deadline_s=_LONGEST_S))
            publish_runs(client, brief, UUID(flow_run.id), in_place=in_place)
    except Exception as exc:  # noqa: BLE001 - a page is not worth a training
        get_run_logger().warning("the page of the storage's runs is not refreshed: %r", exc)


def publish_runs(client: SyncPrefectClient, storage: StorageSpec, flow_run_id: UUID | None, *, in_place: bool = False) -> None:
    """Publish the page of `storage`.

    Costs three small requests for each run, and a read of the metrics of the newest fifty, of four at a time: those of no
    further run after ten seconds.

    Args:
        client: A client of Prefect's API.
        storage: The storage.
        flow_run_id: The flow run that refreshes it.
        in_place: Whether the newest version is updated, if there is one, instead of adding one of this flow run.

    Raises:
        StorageError: If the storage does not answer.

    """
    rows, num_left_out = read_runs(storage)
    if not rows:
        return
    name = canonical(storage.url).rstrip("/").rpartition("/")[2]
    page = write_runs(storage.url, rows, num_left_out, time.time())
    key, description = f"{artifact_key(name, storage.url)}-runs", f"The runs in `{storage.url}`"
    add_version(client, flow_run_id, key, page, description, in_place=in_place)


def read_runs(storage: StorageSpec, clock: Callable[[], float] = time.monotonic) -> tuple[list[RunRow], int]:
    """Return the runs whose newest attempts are the newest, newest first, and the number of the others.

    Args:
        storage: The storage.
        clock: Returns seconds; after ten of them, the metrics of no further run are read.

    """
    opened = open_storage(storage)  # once: each client looks for a login, and connects, anew
    names = list(list_runs(opened))
    stores = [CheckpointStore.open(opened, name) for name in names[-_MAX_RUNS:]]
    found = [RunRow(store.run, it) for store, it in zip(stores, read_all(stores, _status), strict=True) if it is not None]
    found.sort(key=lambda row: row.status.attempt.claimed_at, reverse=True)
    read = partial(_with_metrics, opened, clock() + _LONGEST_S, clock)
    return for_each(found[:_MAX_ROWS], read, _ROWS_AT_ONCE), len(names) - len(found[:_MAX_ROWS])


def write_runs(url: str, rows: Sequence[RunRow], num_left_out: int, now_s: float) -> str:
    """Return the page.

    Args:
        url: The storage.
        rows: Its runs, in the order of the page.
        num_left_out: The number of runs that are not among them.
        now_s: The current time (seconds since the epoch).

    """
    command = as_command("ls", url)
    lines = [
        "# Runs",
        "",
        f"`{url}` as of {show_time(now_s)} UTC; refreshed at the end of each training, and by the flow `prune`.",
        "",
        "| run | state | step | best | curve | attempts | started (UTC) |",
        "| :-- | :-- | --: | --: | :-- | --: | :-- |",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
        *(("", f"Not shown: {show_count(num_left_out, 'other run')}; see `{command}`") if num_left_out else ()),
    ]
    return "\n".join(lines)


def _status(store: CheckpointStore) -> AttemptStatus | None:
    try:
        return read_status(store)
    except (CheckpointError, PermissionError):  # made by a newer version, damaged, or denied: the other runs are shown
        return None


def _with_metrics(storage: Storage, until_s: float, clock: Callable[[], float], row: RunRow) -> RunRow:
    if clock() >= until_s:
        return row
    try:
        return _read_metrics(CheckpointStore.open(storage, row.name), row)
    except (CheckpointError, OSError, ValueError, LookupError) as exc:  # as in `_status`
        get_run_logger().warning("the metrics of run %r are not on the page of its storage: %s", row.name, exc)
        return row


def _read_metrics(store: CheckpointStore, row: RunRow) -> RunRow:
    since = row.status.attempt.lineage
    history = [record for record in read_history(store, since=since) if not record.is_logged]
    if not history:
        return _as_sweep(store, row)
    policy = row.status.attempt.policy
    name = score = policy.checkpoint_score_attribute
    points = _points(history, score)
    if not points:  # also of a score that evaluations attach: to read those takes a request for each
        name = next((key for key, _ in numbers_in(history[-1].metrics)), None)
        points = _points(history, name)
    choose = max if policy.checkpoint_score_order == "max" else min
    best = None
    if points:
        values = [value for _, value in points]
        best = choose(values) if name == score else values[-1]
    return RunRow(row.name, row.status, history[-1].step, name, best, tuple(points))


def _points(history: Sequence[MetricRecord], name: str | None) -> list[Point]:
    by_step = {} if name is None else {record.step: value for record, value in finite_values(history, name)}
    return sorted(by_step.items())  # a step that was trained again has replaced the lost one


def _as_sweep(store: CheckpointStore, row: RunRow) -> RunRow:
    """Return the row of a sweep: its number of trials, and the best of them; `row` itself if the run is no sweep."""
    definition = read_definition(store)
    if definition is None:
        return row
    metric, mode = definition.metrics[0], definition.modes[0]
    trials, _ = read_known_trials(store)
    scores = [score for trial in trials.values() if (score := score_of(trial, metric, mode)) is not None]
    best = None if not scores else min(scores) * (1 if mode == "min" else -1)
    return replace(row, metric=metric, best=best, num_trials=len(trials))


def _show_name(name: str) -> str:
    """Return a run's name without its middle if it is long: names that a program has made often differ at their ends."""
    is_broken = all(len(word) <= _LONGEST_WORD for word in name.split("-"))
    half = (_LONGEST_NAME if is_broken else _LONGEST_WORD) // 2
    return name if len(name) <= 2 * half else f"{name[: half - 1]}…{name[-half:]}"


def _cells(row: RunRow) -> Iterator[str]:
    attempt, led_by = row.status.attempt, row.status.attempt.owner.flow_run_id
    page = flow_run_page(led_by)
    name = _show_name(row.name)
    yield plain_text(name) if page is None else f"[{link_text(name)}]({page})"
    yield row.status.state
    yield show_count(row.num_trials, "trial") if row.num_trials is not None else "" if row.step is None else str(row.step)
    is_scored = row.num_trials is not None or row.metric == attempt.policy.checkpoint_score_attribute
    which = "" if is_scored else " (last)"  # whether a low or a high value is better is unknown
    metric = plain_text(shorten(row.metric or "", _LONGEST_METRIC))
    yield "" if row.best is None else f"{metric} {show_number(row.best)}{which}"
    picture = draw_sparkline(row.points)
    yield "" if picture is None else f"![{plain_text(row.metric or 'curve')}]({as_data_url(picture)})"
    yield str(attempt.number)
    yield show_time(seconds_of(attempt.claimed_at))[5:16]
