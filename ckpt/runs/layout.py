"""The keys of everything in a run.

<run>/run.json                       format version, run id (uuid), created at and by
<run>/sweep.json                     of a sweep: what it searches; its trials are runs in its directory
<run>/journal/<last>-<attempt>-<count>.jsonl  of a sweep: `count` entries that end with number `last`
<run>/deployed.json                  of a sweep: exists while flow runs of a deployment lead its trials
<run>/asked/<trial>-<token>.json     of a sweep: a question of a trial's leader
<run>/answered/<trial>-<token>.json  of a sweep: its answer
<run>/last-pin.json                  of a sweep: the trial with the newest pin, and the one that is to begin from that
<run>/attempts/<attempt>-<token>.json  a claim of the attempt; unique per claimer, so no claim overwrites another
<run>/outcomes/<attempt>.json        how the attempt ended
<run>/checkpoints/<id>/<path>        data, immutable
<run>/unreported/<attempt>-<token>/<path>  files that a rank still writes, on a local filesystem; nobody lists them
<run>/manifests/<id>.json            the commit point, written last
<run>/manifests/<id>.incoming        no manifest: the checkpoint is being copied here, and its data are no garbage
<run>/manifests/<id>/<name>.json     metrics attached after the commit; here, so that listing manifests finds them at no cost
<run>/metadata/<id>.json             metadata set after the commit
<run>/latest.json                    a hint; may be stale or missing without harm
<run>/metrics/<attempt>-<last>-<count>.jsonl  metric history: `count` records that end with number `last`, written once
<run>/logs/<attempt>/rank-<rank>.<part>.log  lines of a rank, written once
<run>/logs/<attempt>/rank-<rank>.<part>.<end>-<length>.log  of a part that grows: `length` bytes that end with its byte `end`
<run>/evaluation-logs/<name>/<id>/rank-<rank>.<part>.log  of a rank that evaluated a checkpoint; they grow likewise
<run>/code/<digest>.zip              the working directory of its ranks, named by the archive's digest
<run>/evaluation-code/<name>/<digest>.zip  that of the ranks of an evaluation
<run>/pins/<id>.<token>.json         a pin; unique per call (version 0.1 wrote <id>.json)
<run>/pins/deletion.<token>.json     no pin: proves to a pending deletion that a listing of pins is real; exists for a moment
<run>/quarantine/<id>.json           a damaged checkpoint's manifest, and the reason; its data stay where they are
<run>/index/<count>-<token>.json     contents of `count` manifests, for fast reading; may be missing without harm
<run>/deletions/<token>.json         the ids of a pending deletion; exists for a moment
<run>/deletions/pin.<token>.json     no mark: proves to a pin that a listing of marks is real, or to a copy that
                                     its target is another storage; exists for a moment
<run>/.tmp-000000000000000<number>   no objects: space that is given up for a claim or a mark once a local disk is full
<run>/synced.json                    only where a tool copies the run to: its directory exists there before the first download
"""

import re
from dataclasses import dataclass
from pathlib import PurePath

from prefect_torch.ckpt.runs.manifest import is_id

_CHECKPOINTS = "checkpoints"
_CLAIM = re.compile(r"(?P<number>[0-9]{6})-[0-9a-f]{8}\.json")
_OUTCOME = re.compile(r"(?P<number>[0-9]{6})\.json")
TRIAL_NAME = r"trial-[0-9]{4,9}-[0-9a-f]{8}"
# A run, or a trial in the directory of its sweep; Prefect's forms use this pattern, too.
RUN_NAME = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}(/{TRIAL_NAME})?"


def check_run_name(run: str) -> str:
    """Return `run` if it can name a directory on every backend; a trial's name is a directory within its sweep's.

    Raises:
        ValueError: If it is not 1 to 200 letters, digits, ".", "_" or "-" that begin with a letter or digit.

    """
    if not isinstance(run, str) or not is_run_name(run):
        raise ValueError(f"run name {run!r}: use 1 to 200 letters, digits, '.', '_' or '-', beginning with a letter or a digit")
    return run


def is_run_name(name: str) -> bool:
    """Return whether `check_run_name` would accept a name."""
    return re.fullmatch(RUN_NAME, name) is not None


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys of one run."""

    run: str

    @property
    def run_info(self) -> str:
        return f"{self.run}/run.json"

    @property
    def sweep(self) -> str:
        return f"{self.run}/sweep.json"

    @property
    def journal(self) -> str:
        return f"{self.run}/journal/"

    @property
    def deployed(self) -> str:
        return f"{self.run}/deployed.json"

    @property
    def all_asked(self) -> str:
        return f"{self.run}/asked/"

    def asked(self, token: str) -> str:
        return f"{self.all_asked}{token}.json"

    @property
    def all_answered(self) -> str:
        return f"{self.run}/answered/"

    def answered(self, token: str) -> str:
        return f"{self.all_answered}{token}.json"

    @property
    def last_pin(self) -> str:
        return f"{self.run}/last-pin.json"

    @property
    def latest(self) -> str:
        return f"{self.run}/latest.json"

    @property
    def attempts(self) -> str:
        return f"{self.run}/attempts/"

    @property
    def outcomes(self) -> str:
        return f"{self.run}/outcomes/"

    @property
    def checkpoints(self) -> str:
        return f"{self.run}/{_CHECKPOINTS}/"

    @property
    def all_unreported(self) -> str:
        return f"{self.run}/unreported/"

    def unreported(self, attempt: int, token: str) -> str:
        return f"{self.all_unreported}{attempt:06d}-{token}"

    @property
    def manifests(self) -> str:
        return f"{self.run}/manifests/"

    @property
    def metrics(self) -> str:
        return f"{self.run}/metrics/"

    @property
    def pins(self) -> str:
        return f"{self.run}/pins/"

    @property
    def quarantined(self) -> str:
        return f"{self.run}/quarantine/"

    def attempt(self, number: int, token: str) -> str:
        return f"{self.attempts}{number:06d}-{token}.json"

    def outcome(self, attempt: int) -> str:
        return f"{self.outcomes}{attempt:06d}.json"

    def data(self, checkpoint_id: str, path: str = "") -> str:
        return f"{self.checkpoints}{checkpoint_id}/{path}"

    def manifest(self, checkpoint_id: str) -> str:
        return f"{self.manifests}{checkpoint_id}.json"

    def incoming(self, checkpoint_id: str) -> str:
        return f"{self.manifests}{checkpoint_id}.incoming"  # older versions take it for a newer version's manifest

    def evaluations(self, checkpoint_id: str) -> str:
        return f"{self.manifests}{checkpoint_id}/"

    def evaluation(self, checkpoint_id: str, name: str) -> str:
        return f"{self.evaluations(checkpoint_id)}{name}.json"

    def metadata(self, checkpoint_id: str) -> str:
        return f"{self.run}/metadata/{checkpoint_id}.json"

    def metrics_chunk(self, attempt: int, last: int, count: int) -> str:
        return f"{self.metrics}{attempt:06d}-{last:09d}-{count:04d}.jsonl"

    @property
    def all_evaluation_codes(self) -> str:
        return f"{self.run}/evaluation-code/"

    def codes(self, evaluation: str | None = None) -> str:
        return f"{self.run}/code/" if evaluation is None else f"{self.all_evaluation_codes}{evaluation}/"

    def code(self, digest: str, evaluation: str | None = None) -> str:
        return f"{self.codes(evaluation)}{digest}.zip"

    @property
    def all_logs(self) -> str:
        return f"{self.run}/logs/"

    def logs(self, attempt: int) -> str:
        return f"{self.all_logs}{attempt:06d}/"

    @property
    def all_evaluation_logs(self) -> str:
        return f"{self.run}/evaluation-logs/"

    def evaluations_logs(self, name: str) -> str:
        return f"{self.all_evaluation_logs}{name}/"

    def evaluation_logs(self, name: str, checkpoint_id: str) -> str:
        return f"{self.evaluations_logs(name)}{checkpoint_id}/"

    def pin(self, checkpoint_id: str, token: str) -> str:
        return f"{self.pins}{checkpoint_id}.{token}.json"

    def pins_witness(self, token: str) -> str:
        return f"{self.pins}deletion.{token}.json"

    @property
    def deletions(self) -> str:
        return f"{self.run}/deletions/"

    def deletion(self, token: str) -> str:
        return f"{self.deletions}{token}.json"

    def deletions_witness(self, token: str) -> str:
        return f"{self.deletions}pin.{token}.json"

    @property
    def index(self) -> str:
        return f"{self.run}/index/"

    def index_segment(self, count: int, token: str) -> str:
        return f"{self.index}{count:06d}-{token}.json"

    def quarantine(self, checkpoint_id: str) -> str:
        return f"{self.quarantined}{checkpoint_id}.json"

    @property
    def copied_with_checkpoints(self) -> tuple[str, ...]:
        """The prefixes of what each copy of a run's checkpoints needs beside them: the history, by which a prune is limited."""
        return self.attempts, self.outcomes, self.metrics

    @property
    def copied(self) -> tuple[str, ...]:
        """The prefixes of what a copy of a whole run needs before its checkpoints, those that others rely on first."""
        of_training = (self.pins, self.quarantined, self.all_logs)
        return *self.copied_with_checkpoints, *of_training, self.codes(), self.all_evaluation_codes, self.journal


def lies_in_checkpoint(path: PurePath) -> bool:
    """Return whether a local directory is that of a checkpoint's data in some run, or lies in one."""
    return any(is_checkpoint_folder(folder.parent.name, folder.name) for folder in (path, *path.parents))


def is_checkpoint_folder(parent: str, name: str) -> bool:
    """Return whether a directory `name` in a directory named `parent` can be that of a checkpoint's data."""
    return parent == _CHECKPOINTS and is_id(name)


def unreported_attempt(layout: Layout, key: str) -> int:
    """Return the attempt whose rank wrote the unreported file at `key`; 0 if it was another program."""
    number = key.removeprefix(layout.all_unreported).partition("-")[0]
    return int(number) if number.isdecimal() else 0


def attempt_number(key: str) -> int:
    """Return the attempt number of the claim at `key`; 0 if `key` is no claim's."""
    claim = _CLAIM.fullmatch(key.rpartition("/")[2])
    return 0 if claim is None else int(claim["number"])


def outcome_number(key: str) -> int:
    """Return the number of the attempt whose outcome is at `key`; 0 if `key` is no outcome's."""
    outcome = _OUTCOME.fullmatch(key.rpartition("/")[2])
    return 0 if outcome is None else int(outcome["number"])


def log_name(rank: int, part: int) -> str:
    """Return the name of a part of a rank's log."""
    return f"rank-{rank}.{part:06d}.log"


def log_piece_name(rank: int, part: int, end: int, length: int) -> str:
    """Return the name of a piece of a part that grows: its last `length` bytes, up to byte `end`."""
    return f"rank-{rank}.{part:06d}.{end:09d}-{length:09d}.log"


def stem(key: str) -> str:
    """Return the last name of `key` without its ending: the id of a manifest, a pin, a quarantine note."""
    return key.rpartition("/")[2].partition(".")[0]
