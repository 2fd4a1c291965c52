"""Whether tests notice defects: a fixed list of small changes of the core, each of which some test must fail for.

    python tests/benchmarks/mutants.py [--only ckpt/runs]

Each change is made in a copy of the package, which tests import instead of the installed one; nothing here is changed. A mutant
is "killed" if its tests fail, "hung" if they do not end within five minutes, and "survived" if they pass, which is a missing
test. The copy without any change must pass them.
The score is written to tests/benchmarks/results/mutants.txt; with --only, it is only printed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from result_file import ROOT, write_results

_LONGEST_S = 300.0
FOLDERS = ("ckpt", "tasks", "flows", "deployments")


@dataclass(frozen=True)
class Mutant:
    """One occurrence of `old` in `path` becomes `new`; the first one, if there are several."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}"


def mutants_of(path: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant(path, old, new, tuple(tests.split())) for old, new in changes]


MUTANTS = [
    *mutants_of(
        "ckpt/runs/retention.py",
        "tests/ckpt/runs/test_retention.py",
        ("return (0, 0.0)", "return (3, 0.0)"),
        ("return (1, 0.0)", "return (2, 0.0)"),
        ('value if order == "max" else -value', "value"),
        ("value < 1", "value < 0"),
        ("isinstance(value, bool) or not isinstance(value, int)", "not isinstance(value, int)"),
        ("keep_last: int = 1", "keep_last: int = 2"),
    ),
    *mutants_of(
        "ckpt/runs/attempts/attempt.py",
        "tests/ckpt/runs/attempts/test_attempt.py",
        ("checkpoint_id if is_id(checkpoint_id) else None", "checkpoint_id"),
    ),
    *mutants_of(
        "ckpt/runs/attempts/owner.py",
        "tests/ckpt/runs/attempts/test_owner.py",
        ("return is_of_same_flow_run and self != other", "return is_of_same_flow_run"),
        ("return started is None or self.started not in (None, started)", "return started is None"),
        ("return started is None or self.started not in (None, started)", "return started != self.started"),
        ("return not _exists(self.pid)", "return True"),
        ('None if state == b"Z" else int(fields[18])', "int(fields[18])"),
        ("if self.host not in (here, here.rpartition", "if False and self.host not in (here, here.rpartition"),
    ),
    *mutants_of(
        "ckpt/runs/attempts/claims.py",
        "tests/ckpt/runs/attempts/test_claims.py tests/ckpt/runs/attempts/test_status.py",
        ("number = next_number(run, claim_keys(run) if known is None else known)", "number = 1"),
        ("max([newest, *committed, *ended])", "max([newest, *committed])"),
        ("max([newest, *committed, *ended])", "max([newest, *ended])"),
        ("if is_newest and is_next:", "if is_next:"),
        ("if is_newest and is_next:", "if is_newest:"),
        ("if known is not None and not known.issuperset(claims):", "if False:"),
        ("if not torn.issuperset(unreadable):", "if False:"),
        ("for attempt in readable:", "for attempt in readable[:1]:"),
        ("lineage=number if lineage is None else lineage", "lineage=number"),
        ("_newest_number(listed)) > attempt:", "_newest_number(listed)) > attempt + 1:"),
        ("if claim not in listed:\n        raise", "if attempt not in map(attempt_number, listed):\n        raise"),
    ),
    *mutants_of(
        "ckpt/runs/attempts/claims.py", "tests/ckpt/storage/test_listings.py", ("if claim not in listed:", "if False:")
    ),
    *mutants_of(
        "ckpt/runs/attempts/status.py",
        "tests/ckpt/runs/attempts/test_status.py",
        ('"unknown" if is_gone is None else "lost"', '"lost" if is_gone is None else "lost"'),
        ('return self.state in ("running", "unknown")', 'return self.state == "running"'),
    ),
    *mutants_of(
        "ckpt/runs/deletion/limits.py",
        "tests/ckpt/runs/test_prune_limits.py",
        ("if status.has_all_reports and not status.has_unreadable_successor:", "if False:"),
        ("if status.has_all_reports and not status.has_unreadable_successor:", "if status.has_all_reports:"),
        ("if status.has_all_reports and", "if status.is_done and"),
        ("if status.outcome is None else None", ""),
        ("min((it for it in", "max((it for it in"),
        ("(*self.in_use, *in_use)", "tuple(in_use)"),
        ("(() if restored is None else (restored,), newest_recorded(run), own", "((), newest_recorded(run), own"),
    ),
    *mutants_of(
        "ckpt/runs/deletion/garbage.py",
        "tests/ckpt/test_checkpoint_store.py tests/ckpt/runs/test_evaluations.py tests/ckpt/runs/test_quarantine.py",
        (
            "now_s = max([*written_s, time.time() - _DAY_S] if is_over else written_s, default=0.0)",
            "now_s = time.time()",
        ),
        ("at_least_s = min(found.now_s, time.time())", "at_least_s = found.now_s"),
        ("if not run.exists(checkpoint_id):  # it may", "if True:  # it may"),
        ("return attempt <= self.newest_over and", "return"),
        ("newest_over=newest if is_over else newest - 1", "newest_over=newest - 1"),
        ("and step_of(other) > step for other", "for other"),
        ("and step_of(other) > step for other", "and other > checkpoint_id for other"),
        ("self.modified_s[checkpoint_id] < self.now_s - grace_s", "True"),
        ("return is_id(checkpoint_id) and", "return"),
        ("and since_s <= expired_s]", "]"),
    ),
    *mutants_of(
        "ckpt/runs/deletion/marks.py",
        "tests/ckpt/test_checkpoint_store.py -k tried_again",
        ("if self._since_put.elapsed_s > _HOLDS_S:", "if False:"),
    ),
    *mutants_of(
        "ckpt/runs/deletion/pruning.py",
        "tests/ckpt/test_checkpoint_store.py tests/ckpt/runs/test_evaluations.py tests/ckpt/runs/test_quarantine.py",
        ("[it for it in group if it.id not in pinned]", "group"),
        ("if len(group) == 1:", "if True:"),
        ("pinned=pinned, in_use=kept", "pinned=frozenset(), in_use=kept"),
        ("in_use=kept, up_to=limits.up_to", "in_use=kept, up_to=None"),
        ("if dry_run or not decided.drop:", "if not decided.drop:"),
        ("[*about, *gone]", "gone"),
    ),
    *mutants_of(
        "ckpt/runs/deletion/links.py",
        "tests/ckpt/test_checkpoint_store.py -k link",
        ('links[key.rpartition("/")[0]] or key', "key"),
        ("            return None\n    return None", "            return key\n    return None"),
    ),
    *mutants_of("ckpt/state/plan.py", "tests/ckpt/state/test_index.py", ("== corners(", ">= corners(")),
    *mutants_of(
        "ckpt/state/index.py",
        "tests/ckpt/state/test_index.py",
        ("if not value.bytes:", "if False:"),
        ("if self.block_bytes % tensor.item_bytes:", "if False:"),
        ("math.prod(max(size, 1) for size in shape)", "math.prod(shape)"),
        ("rank >= self.world_size", "rank > self.world_size"),
    ),
    *mutants_of(
        "ckpt/runs/deletion/pruning.py",
        "tests/ckpt/runs/test_interleavings.py",
        ("stayed = _delete_all(run, decided.drop,", "stayed = () and _delete_all(run, decided.drop,"),
    ),
    *mutants_of(
        "ckpt/runs/run.py",
        "tests/ckpt/runs/test_evaluations.py tests/ckpt/test_checkpoint_store.py",
        ("if not self.exists(checkpoint_id):\n            self.storage.delete", "if False:\n            self.storage.delete"),
    ),
    *mutants_of(
        "ckpt/checkpoint_store.py",
        "tests/ckpt/runs/test_evaluations.py tests/ckpt/test_checkpoint_store.py",
        ("check_free(self.committed(checkpoint_id), name)", "self.committed(checkpoint_id)"),
        ("self.committed(checkpoint_id)  # last:", "pass  # last:"),
        ("if stem(key) == checkpoint_id])", "])"),
        ("attribute, order)[:k]", "attribute, order)"),
    ),
    *mutants_of(
        "ckpt/runs/evaluations.py",
        "tests/ckpt/runs/test_evaluations.py",
        ("if name in manifest.reported:", "if False:"),
        ("metrics={**manifest.metrics, **found}", "metrics=found"),
        ("or is_id(stem(name)):", ":"),
        ("    return has_score  #", "    return False  #"),
        ("has_score=is_missing and it == name", "has_score=is_missing"),
    ),
    *mutants_of(
        "ckpt/runs/run.py",
        "tests/ckpt/runs/test_foreign_objects.py tests/ckpt/test_checkpoint_store.py",
        ("if manifest.id != checkpoint_id:", "if False:"),
        ("return hint if isinstance(hint, str) and is_id(hint) else None", "return hint"),
        ("newer[0].id != hint) and self.exists(hint):", "newer[0].id != hint):"),
        ("yield from reversed(newer)", "yield from newer"),
        ("if hint is None or it.id < hint)", ")"),
    ),
    *mutants_of(
        "ckpt/runs/resume.py",
        "tests/ckpt/test_checkpoint_store.py tests/ckpt/runs/test_quarantine.py",
        ("self.prove(run, manifest, self.verify)", "pass"),
        ("quarantine(self.run, checkpoint_id, reason)", "pass"),
        ("oldest_attempt=lineage", "oldest_attempt=0"),
        ("_refuse_if_damaged(run, lineage, search.passed_over)", "pass"),
    ),
    *mutants_of(
        "ckpt/storage/keys.py",
        "tests/ckpt/storage/test_storage.py -k TestLocalStorage",
        (r"\.{0,2}", r"\.{0,1}"),
        (r"\.{0,2}", r"\.{1,2}"),
        (r"[\\\x00-\x1f\ud800-\udfff]", r"[\x00-\x1f\ud800-\udfff]"),
        (r"[\\\x00-\x1f\ud800-\udfff]", r"[\\]"),
        (r"\ud800-\udfff]", "]"),
        ("_TEMPORARY.fullmatch(name)", "_TEMPORARY.match(name[:5])"),
        ("_KEPT_OPEN.fullmatch(name)", "_KEPT_OPEN.match(name)"),
    ),
    *mutants_of(
        "ckpt/storage/local_files/storage.py",
        "tests/ckpt/storage/test_storage.py -k TestLocalStorage",
        ("_unlink(way, [temporary])", "pass"),
        ("require_whole(file.fileno(), written, lambda: self._path(key))", "pass"),
        ("way.replace(temporary, name)", "way.replace(name, temporary)"),
        ("os.fsync(file.fileno())", "pass"),
        ("st_mtime <= newest_s", "st_mtime > 0"),
        ("refused = refused or exc", "pass"),
    ),
    *mutants_of(
        "ckpt/storage/local_files/walk.py",
        "tests/ckpt/storage/test_storage.py -k TestLocalStorage",
        ("and not is_unlisted(entry.name)", ""),
        ("or after.startswith(key)", ""),
        ("len(levels) == MOST_LEVELS", "len(levels) == 10**9"),
    ),
    *mutants_of(
        "ckpt/storage/local_files/free_space.py",
        "tests/ckpt/storage/test_storage.py -k TestLocalStorage",
        ("and self._taken > self._free", "and False"),
        ("and self._taken > self._free", "and self._taken >= self._free"),
        ("self._taken += count", "self._taken = count"),
        ("if filesystem.f_blocks else None", ""),
    ),
    *mutants_of(
        "ckpt/storage/retry.py",
        "tests/ckpt/storage/test_retry.py",
        ("isinstance(error, (FileNotFoundError, ValueError))", "isinstance(error, FileNotFoundError)"),
        ("isinstance(error, (FileNotFoundError, ValueError))", "isinstance(error, ValueError)"),
        ("(StorageError, ConnectionError, TimeoutError)", "(StorageError, ConnectionError)"),
        ("(StorageError, ConnectionError, TimeoutError)", "(ConnectionError, TimeoutError)"),
        ("error.errno in _TRANSIENT_ERRNOS", "error.errno not in _TRANSIENT_ERRNOS"),
        ('return "credentials"', 'return "final"'),
        ("token = _retries_end.set(event)", "token = _retries_end.set(threading.Event())"),
    ),
    *mutants_of(
        "ckpt/storage/specs/cloud_blocks.py",
        "tests/ckpt/storage/test_cloud_specs.py",
        ('.lstrip("?")', ""),
        ('fields.get("defaultendpointsprotocol", "https")', '"http"'),
        ("if account is None:", "if False:"),
        ('options["allow_http"] = "true"', "pass"),
    ),
    *mutants_of(
        "ckpt/storage/object_store/backend.py",
        "tests/ckpt/storage/test_ranged_reads.py",
        ("if left >= len(into):", "if False:"),
        ("left = max(0, self.size(key) - start)", "left = 0"),
    ),
    *mutants_of(
        "ckpt/storage/object_store/ranged_reads.py",
        "tests/ckpt/storage/test_ranged_reads.py",
        ("if len(data) < wanted:", "if False:"),
        ("if len(under_way) == _AHEAD:", "if len(under_way) > _AHEAD:"),
        ("size > _LARGE_BYTES", "size > 10 * _LARGE_BYTES"),
    ),
    *mutants_of(
        "ckpt/reporting/exchange/peers.py",
        "tests/ckpt/reporting/test_peers.py tests/ckpt/reporting/test_reports.py tests/ckpt/reporting/test_overhead.py",
        ("if (values := self._try_get(keys, 0.0)) is not None:", "if False:"),
        ("all(it.has_returned for it in exits)", "False"),
        ("if it.rank != self.rank]", "]"),
    ),
    *mutants_of(
        "ckpt/reporting/exchange/exits.py",
        "tests/ckpt/reporting/test_peers.py tests/ckpt/reporting/test_reports.py tests/ckpt/reporting/test_overhead.py",
        ("if not key_value.check(exit_key(left.rank)):", "if True:"),
        ("key_value.add(_NUM_FAILURES, 1)", "pass"),
    ),
    *mutants_of(
        "ckpt/reporting/checkpoint_requests.py",
        "tests/ckpt/reporting/test_overhead.py",
        ("unless=self._rounds.next_begun", "unless=None"),
        ('self.stop_requested = answer == "end"', "self.stop_requested = False"),
        ("_SPAN_CALLS = 16", "_SPAN_CALLS = 64"),
        ("self._topics.clear()", "pass"),
        ("if self._is_terminating():", "if False:"),
    ),
    *mutants_of(
        "ckpt/reporting/overhead.py",
        "tests/ckpt/reporting/test_overhead.py",
        ("or self._costs.num_ended < self._costs.num_begun", ""),
        ("self._costs.stall_s / self._target_overhead", "self._costs.stall_s"),
    ),
    *mutants_of(
        "ckpt/reporting/commit.py",
        "tests/ckpt/reporting/test_timings.py tests/ckpt/reporting/test_reports.py",
        ('{"stall_s": max(', '{"stall_s": min('),
        ("max(all_stored_s, *(part.stored_s for part in parts))", "all_stored_s"),
        ("check_fence(run, job.claim)\n    looked_s", "pass\n    looked_s"),
    ),
    *mutants_of(
        "tasks/rank/failures.py",
        "tests/tasks/rank/test_failures.py tests/tasks/training/test_restarts.py",
        ('(StorageFullError, "user")', '(StorageFullError, "infrastructure")'),
        ('(FencedError, "final")', '(FencedError, "user")'),
        ('(MemoryError, "out_of_memory")', '(MemoryError, "user")'),
        ('"withdrawn": "user"', '"withdrawn": "infrastructure"'),
    ),
    *mutants_of(
        "tasks/training/restarts.py",
        "tests/tasks/training/test_restarts.py",
        ("self._here[kind] += 1", "self._here[kind] += 0"),
        ("return not self._is_used_up(kind)", "return True"),
        ("else sum(budgets)", "else max(budgets)"),
        ("if self._earlier is not None or not self._is_rerun:", "if True:"),
        ("self._here[kind] + earlier > budget", "self._here[kind] > budget"),
        ('"preemption" if attempt.number in committed', '"preemption" if attempt.number not in committed'),
    ),
    *mutants_of(
        "tasks/training/start.py",
        "tests/tasks/training/test_start.py",
        ("node_copy.verify(source, checkpoint.manifest, run.verify)", "pass"),
        ("        pin.set(source)", "        pass"),
        ("own, node_copy, pin)", "own, node_copy, None if is_own else pin)"),
        ("is_pinned_by_sweep = job.decisions is not None", "is_pinned_by_sweep = False"),
        ("checkpoint.manifest if is_own else None", "checkpoint.manifest"),
        ("record_resumed_from(store, attempt, checkpoint.path)", "pass"),
        ('if job.run_config.resume == "must":', "if False:"),
    ),
    *mutants_of(
        "tasks/training/outcomes.py",
        "tests/flows/sweeps/test_sweeping.py -k is_away",
        ("(StorageError, OSError)", "OSError"),
    ),
    *mutants_of(
        "flows/trials/local_trials.py",
        "tests/flows/sweeps/test_sweeping.py -k is_away --timeout=60",
        ("if running.error is None else end_of_error", "if False else end_of_error"),
    ),
    *mutants_of(
        "ckpt/reporting/rounds.py",
        "tests/ckpt/reporting/test_reports.py -k repeats_the_step",
        ("self._background.wait()", "pass"),
        ("any(intent.awaits_commits for intent in intents)", "intents[0].awaits_commits"),
    ),
    *mutants_of(
        "ckpt/reporting/agreement.py",
        "tests/ckpt/reporting/test_reports.py -k may_report_one_directory",
        ("first.setdefault(directory, rank) != rank", "False"),
    ),
    *mutants_of(
        "ckpt/reporting/commit.py",
        "tests/ckpt/reporting/test_checkpoint_directory.py",
        ("staged.remove(job.moved)", "pass"),
    ),
    *mutants_of(
        "tasks/rank/rendezvous.py",
        "tests/tasks/rank/test_rendezvous.py",
        ("and not value.startswith(_IN_PARTS)", ""),
        ("self._num_parts[key] = num_parts", "pass"),
        ("self._num_parts.pop(key, 0)", "0"),
    ),
    *mutants_of(
        "ckpt/storage/local_files/groups.py",
        "tests/ckpt/storage/test_groups.py",
        ("written.append(name)", "pass"),
        ("if exc.errno not in _CANNOT_LINK and not self._is_refused_by_fuse(exc):", "if True:"),
        ("status.st_nlink == 1", "True"),
    ),
    *mutants_of(
        "ckpt/storage/machine/handover.py",
        "tests/ckpt/storage/test_handover.py tests/ckpt/reporting/test_reports.py",
        ("shutil.move(target / path, root / path)", "pass"),
        ("source.stat().st_nlink == 1", "True"),
    ),
    *mutants_of(
        "ckpt/reporting/rounds.py",
        "tests/ckpt/reporting/test_reports.py -k brings_nothing",
        ("agreement.checkpoint_id is not None and intent.upload is None", "False"),
    ),
    *mutants_of(
        "tasks/prune_task.py",
        "tests/tasks/test_prune_task.py",
        ("check_fence(store, limits.claim)", "pass"),
        ("if garbage and not dry_run:", "if garbage:"),
    ),
    *mutants_of(
        "ckpt/runs/deletion/pruning.py",
        "tests/tasks/test_prune_task.py",
        ("check_fence(run, claim)", "pass"),
        ("mark.remove()", "pass"),
    ),
    *mutants_of(
        "tasks/gang/termination.py",
        "tests/tasks/gang/test_termination.py",
        ("self._grace_s = grace_s", "self._grace_s = 20.0"),
        ("elif isinstance(cause, KeyboardInterrupt):", "else:"),
        ("if self.cause is not None:\n            raise self.cause", "if False:\n            raise self.cause"),
    ),
    *mutants_of(
        "tasks/gang/watch.py",
        "tests/tasks/gang/test_watch.py",
        ("if missed_s > _ASLEEP_S:", "if False:"),
        ("if number != self._heartbeats[rank]:", "if True:"),
        ("if silent_s > _LOST_S:", "if False:"),
        ("self._hang_timeout_s is not None and running and", "self._hang_timeout_s is not None and"),
    ),
    *mutants_of(
        "flows/monitoring/events/observer.py",
        "tests/flows/monitoring/events/test_events.py",
        ('("failed", "preempted")', '("failed",)'),
        ("_NO_NUMBER = (1, math.inf)", "_NO_NUMBER = (0, -math.inf)"),
    ),
    *mutants_of(
        "tasks/prune_task.py",
        "tests/flows/test_pruning.py",
        ("found = prune_limits(store, read_status(store))", "found = PruneLimits()"),
    ),
    *mutants_of(
        "ckpt/checkpoint_store.py",
        "tests/ckpt/runs/test_prune_limits.py",
        (".narrowed(in_use, up_to)", ""),
        ("prune_limits(self, read_status(self)).narrowed", "prune_limits(self, None).narrowed"),
    ),
    *mutants_of(
        "ckpt/runs/quarantine.py",
        "tests/ckpt/test_crash_points.py -k damaged_newest",
        (
            '    run.records.put_json(key, {"reason"',
            '    run.storage.delete([manifest_key])\n    run.records.put_json(key, {"reason"',
        ),
    ),
    *mutants_of(
        "tasks/gang/machine/link.py",
        "tests/tasks/gang/test_link.py -k worth_nothing",
        ("_digest(secret, part, challenges) for", '_digest(secret, part, b"") for'),
        ("secrets.token_bytes(_NONCE_BYTES)", "bytes(_NONCE_BYTES)"),
        ("Link(connection, keys[ours], keys[theirs])", 'Link(connection, keys[b"leader"], keys[b"leader"])'),
    ),
    *mutants_of(
        "tasks/training/retention_schedule.py",
        "tests/tasks/training/test_retention_schedule.py",
        ("() if restored is None else (restored,)", "()"),
        ("PruneLimits(self._in_use, recorded, self._claim)", "PruneLimits((), recorded, self._claim)"),
        ("self._in_use = ()  # no rank", "pass  # no rank"),
    ),
    *mutants_of(
        "ckpt/reporting/session.py",
        "tests/ckpt/reporting/test_decisions.py",
        ("self._background.wait_and_raise()\n        assert self._decisions", "assert self._decisions"),
    ),
    *mutants_of(
        "ckpt/files/download.py",
        "tests/ckpt/storage/test_folder_readers.py",
        (
            "[run.layout.data(manifest.id, entry.path) for entry in files]):\n        run.check_exists(manifest.id)",
            "[run.check_exists(manifest.id), *(run.layout.data(manifest.id, it.path) for it in files)][1:]):",
        ),
    ),
    *mutants_of(
        "ckpt/reporting/commit.py",
        "tests/ckpt/reporting/test_reports.py -k acknowledges_a_manifest",
        ("run.storage.delete([key])\n        raise", "pass\n        raise"),
    ),
    *mutants_of(
        "ckpt/reporting/rounds.py",
        "tests/ckpt/reporting/test_reports.py -k repeats_the_step_of_a_commit",
        ("if any(intent.awaits_commits for intent in intents):", "if False:"),
    ),
    *mutants_of(
        "ckpt/runs/history.py",
        "tests/ckpt/runs/test_history.py -k lost",
        ("None if self._num_lost else self._before", "self._before"),
    ),
    *mutants_of(
        "ckpt/storage/local_files/copies.py",
        "tests/ckpt/storage/test_groups.py -k large_copy",
        ("if len(writing) == _PIECES:", "if len(writing) > _PIECES:"),
    ),
    *mutants_of("ckpt/files/cache.py", "tests/ckpt/files/test_cache.py", ("fcntl.flock(reader, fcntl.LOCK_UN)", "pass")),
    *mutants_of(
        "tasks/training/attempt_leader.py",
        "tests/tasks/training/test_start.py -k known_to_be_stopped",
        (
            "self._is_stopped = not verdict.goes_on\n            send_verdict(key_value, request.number, verdict)",
            "send_verdict(key_value, request.number, verdict)\n            self._is_stopped = not verdict.goes_on",
        ),
    ),
    *mutants_of(
        "tasks/training/attempt_leader.py",
        "tests/flows/test_interruptions.py -k overtaken_while_it_waited",
        ("check_fence(self._store, claim_key(self._store, claimed))", "pass"),
    ),
    *mutants_of(
        "flows/trials/leading.py",
        "tests/flows/trials/test_leading.py",
        ("if run in busy:", "if False:"),
        ("if not staying:", "if True:"),
        ("        try:\n            staying", "        search.record_deleted(number, run)\n        try:\n            staying"),
    ),
    *mutants_of(
        "deployments/resuming.py",
        "tests/deployments/test_automations.py -k job_variables_of_the",
        ("work_queue_name=crashed.work_queue_name,", ""),
        ("job_variables=crashed.job_variables,", ""),
    ),
]


def main() -> None:
    """Try the mutants and write the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the beginning of paths")
    only = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if mutant.path.startswith(only)]
    outcomes = {}
    for tests, group in groupby(chosen, lambda mutant: mutant.tests):
        without_change = try_out(Mutant("ckpt/storage/keys.py", "", "", tests))
        if without_change == "skipped":  # they need what is not installed here
            print(f"skipped   {' '.join(tests)}", flush=True)
            continue
        assert without_change == "survived", f"{' '.join(tests)}: {without_change} without any change"
        for mutant in group:
            outcomes[str(mutant)] = try_out(mutant)
            print(f"{outcomes[str(mutant)]:8}  {mutant}", flush=True)
    killed = sum(outcome != "survived" for outcome in outcomes.values())
    score = f"{killed} of {len(outcomes)} mutants were killed by their tests; {len(MUTANTS)} are in the list."
    if only:
        print(score)
    else:
        write_results("mutants.txt", 1, [score, "", *(f"{outcome:8}  {name}" for name, outcome in outcomes.items())])


def try_out(mutant: Mutant) -> str:
    """Return what becomes of a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "prefect_torch")
        shutil.copytree(ROOT / "package", package)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, package / name)
        target = package / mutant.path
        text = target.read_text()
        assert mutant.old in text, f"{mutant.path} has no {mutant.old!r} any more"
        target.write_text(text.replace(mutant.old, mutant.new, 1))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_LONGEST_S
            )
        except subprocess.TimeoutExpired:
            return "hung"
    assert done.returncode in (0, 1, 3, 5), done.stdout + done.stderr
    # With 3, pytest itself broke, as it does while it draws the traceback of an endless recursion.
    return {0: "survived", 1: "killed", 3: "killed", 5: "skipped"}[done.returncode]


if __name__ == "__main__":
    main()
