"""Runs told in a few words, for what is computed from attempts alone."""

from datetime import datetime, timezone

from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.flows.monitoring.pages.attempt_log import AttemptLog

BEGUN_S = 1_800_000_000.0  # when every story begins


def checkpoint_id(attempt, step):
    return f"{attempt:06d}-{step:08d}-{'0' * 8}"


def iso(at_s):
    return datetime.fromtimestamp(BEGUN_S + at_s, timezone.utc).isoformat()


def claim(number, at_s=0.0, resumed_from=None, flow_run="a"):
    return Attempt(number, "token", Owner(flow_run, "host/boot", 1, 1), 2, resumed_from, 1, iso(at_s))


def record(attempt, step, at_s=0.0, checkpoint=None, **metrics):
    return MetricRecord(attempt, step, metrics, checkpoint, iso(at_s))


def logged(attempt, step, at_s=0.0, **metrics):
    return MetricRecord(attempt, step, metrics, None, iso(at_s), is_logged=True)


def told(number, claimed_s, steps, ended_s=None, ending=None, saved=(), stall_s=0.0, resumed_from=None, flow_run="a",
         unmeasured=()):  # fmt: skip
    """Return an attempt that reports step `s` at `steps[s]` seconds, and commits those in `saved`."""
    log = AttemptLog(claim(number, claimed_s, resumed_from, flow_run))
    for step, at_s in steps.items():
        saved_id = checkpoint_id(number, step) if step in saved else None
        log.record_report(record(number, step, at_s, saved_id))
        if saved_id is not None:
            log.record_commit(saved_id, None if step in unmeasured else stall_s)
    log.ended_s = None if ended_s is None else BEGUN_S + ended_s
    log.outcome = None if ending is None else Outcome(number, ending, flow_run)
    return log
