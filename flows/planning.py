"""What a training would do if it began now: its start, its checkpoints, its GPUs, its storage and its grace."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
from prefect.settings import PREFECT_API_URL
from prefect_torch.ckpt import Checkpoint, CheckpointError, CheckpointNotFoundError, CheckpointStore, StorageSpec
from prefect_torch.ckpt.runs.attempts.attempt import claim_keys, newest_attempt
from prefect_torch.ckpt.runs.attempts.claims import next_number
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits
from prefect_torch.ckpt.runs.deletion.pruning import prune
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.runs.verification import VerifyLevel, verify
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.probe import probe_storage
from prefect_torch.ckpt.storage.protocol import INTERACTIVE_RETRY_POLICY
from prefect_torch.ckpt.text import show_bytes, show_count, without_login
from prefect_torch.tasks import CheckpointConfig, FailureConfig, GpusBusyError, KubernetesCluster, RunConfig, ScalingConfig
from prefect_torch.tasks.gang.engines.cluster_block import load_cluster
from prefect_torch.tasks.gang.machine.working_dir import pack_directory
from prefect_torch.tasks.options.storage import configured_storage
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.tracebacks import first_line
from prefect_torch.tasks.rank.user_code.function import pack_function
from prefect_torch.tasks.rank.user_code.function_reference import TrainFunction
from prefect_torch.tasks.training.leadership import lineage_of, refuse_if_alive, refuse_other_kind
from prefect_torch.tasks.training.start import missing_run_named, nothing_to_resume

from .arguments import committed_checkpoint, gpus_of, show_ranks

TO_END_S = 5.0  # after the grace: to stop ranks and to record the outcome
Status: TypeAlias = Literal["ok", "warning", "wrong"]
_Check: TypeAlias = Callable[[], Iterable["PlanLine"]]


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One thing that a training would find or do.

    Attributes:
        subject: What it is about.
        status: "ok", "warning" (it would begin, and some of it would be lost) or "wrong" (it would fail).
        text: What was found, and what to do about it.

    """

    subject: str
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a training would do if it began now.

    Attributes:
        lines: All that was found, in the order in which a training would come to it.
        resumes_from: The path or URL of the checkpoint that its ranks would restore; None on a fresh start, or if it would
            not begin.
        keeps: The committed checkpoints that its retention policy keeps, oldest first, each with the reasons.
        prunes: The ids of the committed checkpoints that its first prune would delete, oldest first.

    """

    lines: tuple[PlanLine, ...]
    resumes_from: str | None = None
    keeps: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prunes: tuple[str, ...] = ()

    @property
    def would_begin(self) -> bool:
        """Whether nothing was found that would make the training fail."""
        return all(line.status != "wrong" for line in self.lines)

    def __str__(self) -> str:
        """Return a line for each thing."""
        return "\n".join(f"{line.status:<9}{line.subject:<13}{line.text}" for line in self.lines)


def plan(
    train_fn: str | TrainFunction,
    config: dict[str, Any] | None = None,
    scaling: ScalingConfig | None = None,
    run: RunConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    failure: FailureConfig | None = None,
    resume_from: str | Path | Checkpoint | None = None,
) -> TrainingPlan:
    """Return what `train` with these arguments would do on this machine now; starts nothing and changes nothing.

    Small objects are written to the storage under an unused name, and deleted; `prefect-torch doctor` also writes a large one.
    The checkpoint to resume from is verified by its sizes; the training reads every byte of it. Nothing of the function is
    imported.

    Args:
        train_fn: As for `train`.
        config: As for `train`.
        scaling: As for `train`.
        run: As for `train`.
        checkpoint: As for `train`.
        failure: As for `train`.
        resume_from: As for `train`.

    """
    scaling, run = scaling or ScalingConfig(), run or RunConfig()
    lines = [
        *_found("working_dir", lambda: _check_working_dir(run)),
        *_found("function", lambda: _check_function(train_fn, config, run)),
        *_found("gpus", lambda: _check_gpus(scaling)),
        *_found("grace", lambda: _check_grace(scaling, failure or FailureConfig())),
    ]
    found: list[TrainingPlan] = []

    def look() -> Iterator[PlanLine]:
        spec = configured_storage(run.storage, run.storage_deadline_s, run.sync)
        spec = replace(spec, retry=INTERACTIVE_RETRY_POLICY, options={} if run.sync else spec.options)
        probe = probe_storage(open_storage(spec), quick=True)
        yield PlanLine("storage", "ok", f"{probe.url}: wrote, listed, read and deleted in {probe.total_s:.2f} s")
        if run.sync is not None:
            text = f"{run.sync.target} was not read: a training first downloads the checkpoints that are only there"
            yield PlanLine("storage", "ok", without_login(text))
        found.append(_look_at_run(spec, run, checkpoint or CheckpointConfig(), resume_from))

    lines += _found("storage", look)
    of_run = found[0] if found else TrainingPlan(())
    return replace(of_run, lines=(*lines, *of_run.lines))


def _open(ref: CheckpointRef) -> Checkpoint:
    with missing_run_named(ref):
        return ref.open()


def _found(subject: str, check: _Check) -> list[PlanLine]:
    """Return the lines of a check; its error becomes a line that says why the training would fail."""
    lines: list[PlanLine] = []
    try:
        lines.extend(check())
    except (CheckpointError, GpusBusyError, ValueError, TypeError, RuntimeError, OSError, ImportError) as exc:
        lines.append(PlanLine(subject, "wrong", str(exc)))
    except httpx.HTTPError as exc:
        lines.append(_unanswered(subject, exc))
    return lines


def _unanswered(subject: str, error: httpx.HTTPError) -> PlanLine:
    """Return the line of a check that needs an answer of Prefect's API, and got none."""
    api = PREFECT_API_URL.value() or "Prefect's server of this machine"
    return PlanLine(subject, "wrong", without_login(f"{api} does not answer, or refuses: {first_line(error)}"))


def _check_working_dir(run: RunConfig) -> Iterator[PlanLine]:
    if run.working_dir is not None:
        packed = pack_directory(run.working_dir, configured_storage(run.storage).url)
        yield PlanLine("working_dir", "ok", f"{packed.stored.root}, of which {show_bytes(packed.stored.bytes)} come along")


def _check_function(train_fn: str | TrainFunction, config: dict[str, Any] | None, run: RunConfig) -> Iterator[PlanLine]:
    packed = pack_function(train_fn, config, run.working_dir)
    yield PlanLine("function", "ok", f"{packed.name}, with {show_bytes(len(packed.payload))} of arguments")


def _check_gpus(scaling: ScalingConfig) -> Iterator[PlanLine]:
    gpus, ranks = gpus_of(scaling, "a plan", 0.0), show_ranks(scaling)
    if scaling.cluster is not None:
        named = scaling.cluster if isinstance(scaling.cluster, str) else type(scaling.cluster).__name__
        yield PlanLine("machines", "ok", f"{ranks} on machines of {named}, which was not contacted")
        return
    if not scaling.use_gpu:
        yield PlanLine("gpus", "ok", f"{ranks} without a GPU")
        return
    gpus.check()
    try:
        gpus.take(lambda: None)
    except GpusBusyError as exc:
        waits = "fails" if scaling.wait_for_gpus_s == 0 else "waits"
        yield PlanLine("gpus", "wrong" if waits == "fails" else "warning", f"{exc.in_use}; the training {waits}")
    else:
        ranks = show_count(len(gpus.uuids), "rank")
        yield PlanLine("gpus", "ok", f"{ranks}, each with a GPU, which are free: {', '.join(gpus.uuids)}")
    finally:
        gpus.release()


def _check_grace(scaling: ScalingConfig, failure: FailureConfig) -> Iterator[PlanLine]:
    cluster = None if scaling.cluster is None else load_cluster(scaling.cluster)
    if isinstance(cluster, KubernetesCluster):
        yield compare_grace(failure, cluster.termination_grace_s, "a pod", "a larger termination_grace_s")
    else:
        yield PlanLine("grace", "ok", f"ranks have {failure.grace_s:g} s for a last checkpoint when the training is terminated")


def compare_grace(failure: FailureConfig, given_s: float, what: str, remedy: str) -> PlanLine:
    """Return a line on whether ranks have their grace before the platform kills them.

    Args:
        failure: The grace.
        given_s: When the platform kills `what`, in seconds after its request to end.
        what: The pod or flow run that is killed, as the sentence names it.
        remedy: Another remedy than a shorter grace.

    """
    if failure.grace_s + TO_END_S <= given_s:
        text = f"ranks have {failure.grace_s:g} s for a last checkpoint, and {what} is killed {given_s:g} s after the request"
        return PlanLine("grace", "ok", text)
    text = f"grace_s={failure.grace_s:g} is too long: {what} is killed {given_s:g} s after the request to end, and needs "
    least = f"{TO_END_S:g} s of that to stop; give at most grace_s={max(0.0, given_s - TO_END_S):g}, or {remedy}"
    return PlanLine("grace", "warning", text + least)


def _look_at_run(
    spec: StorageSpec, run: RunConfig, checkpoint: CheckpointConfig, resume_from: str | Path | Checkpoint | None
) -> TrainingPlan:
    try:
        initial = None if resume_from is None else _open(committed_checkpoint(resume_from, spec))
        if run.name is None:
            if initial is None and run.resume == "must":
                raise CheckpointNotFoundError("a run without a name is new, and resume='must' asks for one with a checkpoint")
            return _plan_of_start(_verified(initial, run), "a run with a name of its own", {}, ())
        return _look_at_named(CheckpointStore.open(spec, run.name), run, checkpoint, initial)
    except (CheckpointError, ValueError) as exc:
        return TrainingPlan((PlanLine("start", "wrong", str(exc)),))
    except httpx.HTTPError as exc:
        return TrainingPlan((_unanswered("start", exc),))


def _look_at_named(
    store: CheckpointStore, run: RunConfig, checkpoint: CheckpointConfig, initial: Checkpoint | None
) -> TrainingPlan:
    previous = newest_attempt(store)
    if previous is not None and not run.takeover:
        refuse_if_alive(store, previous, None)
    refuse_other_kind(store, previous, is_sweep=False)
    number = next_number(store, claim_keys(store))
    damaged: dict[str, str] = {}
    chosen = choose_checkpoint(
        store,
        lineage=lineage_of(previous, run, ()) or number,
        verify=_level(run),
        on_quarantine=damaged.__setitem__,
        dry_run=True,
    )
    begins = f"attempt {number} of run {store.run!r}"
    if chosen is None and initial is None and run.resume == "must":
        raise nothing_to_resume(store)
    path = _verified(initial, run) if chosen is None else store.path_of(chosen.id)
    policy = checkpoint.policy()
    limits = PruneLimits(() if chosen is None else (chosen.id,), own_metric=policy.checkpoint_score_attribute)
    decided = prune(store, policy, limits, dry_run=True)
    planned = _plan_of_start(path, begins, decided.keep, tuple(manifest.id for manifest in decided.drop))
    freed_bytes = sum(manifest.total_bytes for manifest in decided.drop)
    kept = f"{len(decided.keep)} committed checkpoints stay, {len(decided.drop)} go: {show_bytes(freed_bytes)}"
    aside = [PlanLine("damaged", "warning", f"{it} would be set aside: {why}") for it, why in damaged.items()]
    return replace(planned, lines=(*aside, *planned.lines, PlanLine("retention", "ok", kept)))


def _verified(initial: Checkpoint | None, run: RunConfig) -> str | None:
    """Verify the initial checkpoint by the sizes of its files, and return its path or URL; None without one."""
    if initial is None:
        return None
    assert initial.store is not None
    verify(initial.store, initial.manifest, _level(run))
    return initial.path


def _level(run: RunConfig) -> VerifyLevel:
    return "none" if run.verify == "none" else "size"


def _plan_of_start(
    resumes_from: str | None, begins: str, keeps: dict[str, tuple[str, ...]], prunes: tuple[str, ...]
) -> TrainingPlan:
    text = f"{begins}, from the beginning" if resumes_from is None else f"{begins}, from {resumes_from}"
    return TrainingPlan((PlanLine("start", "ok", text),), resumes_from, dict(sorted(keeps.items())), prunes)
