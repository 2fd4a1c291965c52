"""Train for minutes while something is killed every few seconds; the result is that of a training that nobody disturbed.

    python tests/benchmarks/soak.py [--storage local|s3] [--minutes 10] [--kills 200] [--seed 0]

Trains `exact_training.py` with two ranks through `prefect_torch.flows.train`, in a process that is started again, with the same
run name, whenever it was killed. `kill -9` hits a rank, the flow's process or, with s3, the server (`rclone serve s3`, which is
started again after a moment on the same port and folder): at a random moment, or as soon as the training has gone on since
the last kill. A training that completes is followed by the next one, until time or kills are used up; then the last one may
complete. Each is compared with one that was not disturbed:

    loss curve   `Result.history` by step, the last attempt's report for each: the same losses, and none missing
    final state  the same bits of weights and momentum
    storage      the checkpoints that the retention plan keeps, the same steps as after the undisturbed run, whole; data that no
                 manifest names waits for its hour of grace and is only counted
    processes    none left of all that were started

Exits with 1 unless all of this holds. Prints what was killed, and writes it to tests/benchmarks/results/soak_STORAGE.txt.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import psutil  # noqa: E402 - here and below: found by the line above, or as the others are
from restarted_process import RestartedProcess  # noqa: E402
from result_file import write_results  # noqa: E402

CONFIG = {"epochs": 120, "batches": 3, "pause_s": 0.05}
MARK = "PREFECT_TORCH_SOAK"
LONGEST_S = 600.0  # how long the last training may take to complete undisturbed
BUCKET = "soak"


@dataclass
class Place:
    """Where the training stores: the URL for `train`, and the folder where the same objects lie on this machine."""

    url: str
    folder: Path
    environment: dict = field(default_factory=dict)
    server: "Server | None" = None

    def committed(self, run: str) -> list[str]:
        manifests = self.folder / run / "manifests"
        return sorted(path.name for path in manifests.glob("[0-9]*.json")) if manifests.exists() else []


class Server:
    """`rclone serve s3`, killed and started again on one port and folder."""

    def __init__(self, folder: Path) -> None:
        from servers import free_port, rclone_command

        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        self._command = rclone_command(port, folder)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def local_place(scratch: Path) -> Place:
    return Place(str(scratch / "store"), scratch / "store")


def s3_place(scratch: Path) -> Place:
    from servers import ACCESS_KEY, SECRET_KEY

    (scratch / "s3" / BUCKET).mkdir(parents=True)
    server = Server(scratch / "s3")
    environment = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }
    return Place(f"s3://{BUCKET}/runs", scratch / "s3" / BUCKET / "runs", environment, server)


class Trainer(RestartedProcess):
    """The flow's process of one run, started again until it completes."""

    def __init__(self, place: Place, run: str, scratch: Path, data: str) -> None:
        self.place = place
        self.run = run
        self.returned = scratch / f"returned-{run}"
        config = json.dumps({**CONFIG, "data": data})
        command = [sys.executable, __file__, "--train", place.url, run, config, str(self.returned)]
        super().__init__(command, scratch / f"log-{run}")

    def ranks(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return [child for child in children if is_rank(child)]
        return []


def is_rank(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "prefect_torch.tasks.rank.main" in command and not any(word.endswith("guard.py") for word in command)


class Killer:
    """Chooses what to kill and when, by a seed; counts what it hit."""

    def __init__(self, seed: int, kinds: list[str]) -> None:
        self._random = random.Random(seed)
        self._kinds = kinds
        self.hit: Counter = Counter()
        self._server_back_at = 0.0
        self._plan(time.monotonic())

    def _plan(self, now: float) -> None:
        self._kind = self._random.choice(self._kinds)
        self._at = now + self._random.uniform(0.1, 2.5)
        self._waits_for_progress = self._random.random() < 0.5
        self._seen: tuple[str, list[str]] | None = None

    def step(self, trainer: Trainer) -> None:
        """Kill if it is time."""
        now = time.monotonic()
        self.bring_server_back(trainer.place, now)
        committed = trainer.place.committed(trainer.run)
        if self._seen is None or self._seen[0] != trainer.run:  # the next training begins with nothing
            self._seen = (trainer.run, committed)
        if now < self._at or (self._waits_for_progress and committed[-1:] <= self._seen[1][-1:]):
            return
        if self._kill(trainer, now):
            self.hit[self._kind] += 1
            self._plan(now)

    def bring_server_back(self, place: Place, now: float) -> None:
        if self._server_back_at and now >= self._server_back_at:
            self._server_back_at = 0.0
            place.server.start()

    def _kill(self, trainer: Trainer, now: float) -> bool:
        """Kill what is due and say whether it was there."""
        if self._kind == "server":
            if self._server_back_at:
                return False
            trainer.place.server.kill()
            self._server_back_at = now + self._random.uniform(0.2, 3.0)
            return True
        if self._kind == "flow":
            if trainer.process.poll() is None:
                trainer.process.kill()
                return True
            return False
        ranks = trainer.ranks()
        with contextlib.suppress(psutil.NoSuchProcess):
            if ranks:
                self._random.choice(ranks).kill()
                return True
        return False


@dataclass(frozen=True)
class Found:
    """What a training left behind."""

    digest: str
    losses: dict[int, float]
    kept_steps: list[int]
    drops: int
    garbage: int
    quarantined: int
    attempts: int


def look(place: Place, run: str, returned: Path) -> Found:
    """Read the result from storage, as anybody could."""
    from prefect_torch.ckpt import CheckpointStore
    from prefect_torch.ckpt.runs.attempts.attempt import newest_attempt
    from prefect_torch.ckpt.runs.retention import plan
    from prefect_torch.flows import Result

    store = CheckpointStore.open(place.url, run)
    manifests = store.list()
    for manifest in manifests:
        store.verify(manifest)
    data = {info.key.split("/")[2] for info in store.storage.list(store.layout.checkpoints)}
    result = Result.from_storage(place.url, run)
    return Found(
        digest=returned.read_text(),
        losses={record.step: record.metrics["val_loss"] for record in sorted(result.history, key=lambda it: it.attempt)},
        kept_steps=[manifest.step for manifest in manifests],
        drops=len(plan(manifests, newest_attempt(store).policy).drop),
        garbage=len(data - {manifest.id for manifest in manifests}),
        quarantined=len(list(store.storage.list(store.layout.quarantined))),
        attempts=result.attempts,
    )


def differences(found: Found, expected: Found) -> list[str]:
    """Tell in words how a training differs from the undisturbed one."""
    told = []
    if found.digest != expected.digest:
        told.append("the final state differs")
    if missing := sorted(expected.losses.keys() - found.losses.keys()):
        told.append(f"the loss curve lacks {len(missing)} of {len(expected.losses)} steps: {missing}")
    if other := [step for step, loss in found.losses.items() if loss != expected.losses.get(step)]:
        told.append(f"the loss differs at steps {other}")
    if found.kept_steps != expected.kept_steps or found.drops:
        told.append(f"storage holds steps {found.kept_steps} instead of {expected.kept_steps}, {found.drops} to be dropped")
    return told


def train_once(storage: str, run: str, config: str, returned: str) -> None:
    """Run the flow in this process; the file `returned` takes the digest."""
    from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train

    result = train(
        f"{HERE / 'exact_training.py'}:train_exactly",
        json.loads(config),
        ScalingConfig(num_workers=2),
        RunConfig(name=run, storage=storage),
        CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_loss", checkpoint_score_order="min"),
        FailureConfig(max_failures=-1, max_infrastructure_failures=-1),
    )
    Path(returned).write_text(result.return_value)


def train_undisturbed(place: Place, scratch: Path, data: str) -> Found:
    trainer = Trainer(place, "undisturbed", scratch, data)
    trainer.start()
    assert trainer.process.wait(LONGEST_S) == 0, trainer.log.read_text()[-4000:]
    return look(place, trainer.run, trainer.returned)


def train_disturbed(trainer: Trainer, killer: Killer, ends_at: float, kills: int) -> None:
    """Train one run to its end, killing until the time or the kills are used up."""
    trainer.start()
    while not trainer.completed():
        now = time.monotonic()
        if now < ends_at and killer.hit.total() < kills:
            killer.step(trainer)
        else:
            killer.bring_server_back(trainer.place, now)
        assert now < ends_at + LONGEST_S, f"it does not complete: {trainer.log.read_text()[-4000:]}"
        time.sleep(0.02)
    if killer._server_back_at:
        killer.bring_server_back(trainer.place, killer._server_back_at)


def left_behind(mark: str, longest_s: float = 20.0) -> list[str]:
    """Return the commands of processes that carry `mark` and are still there after a while."""
    deadline = time.monotonic() + longest_s
    while True:
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark and process.pid != os.getpid() and process.status() != "zombie":
                    living.append(" ".join(process.cmdline()))
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.2)


def soak(options, scratch: Path, show) -> list[str]:
    """Run it all, show two lines for each training, and return what was wrong."""
    import exact_training

    data = str(scratch / "digits.pt")
    exact_training.write_digits(data)
    place = s3_place(scratch) if options.storage == "s3" else local_place(scratch)
    os.environ.update(place.environment)
    killer = Killer(options.seed, ["rank", "flow", *(["server"] if place.server else [])])
    problems, attempts, restarts, rounds = [], 0, 0, 0
    started = time.monotonic()
    try:
        expected = train_undisturbed(place, scratch, data)
        assert sorted(expected.losses) == list(range(CONFIG["epochs"])), "the undisturbed loss curve has gaps"
        started = time.monotonic()
        while time.monotonic() < started + options.minutes * 60 and killer.hit.total() < options.kills:
            rounds += 1
            before = killer.hit.copy()
            trainer = Trainer(place, f"run-{rounds}", scratch, data)
            train_disturbed(trainer, killer, started + options.minutes * 60, options.kills)
            found = look(place, trainer.run, trainer.returned)
            told = differences(found, expected)
            told += [f"the flow's process ended by itself with {trainer.ended_by_itself}"] if trainer.ended_by_itself else []
            attempts += found.attempts
            restarts += trainer.starts - 1
            problems += [f"{trainer.run}: {text}" for text in told]
            kills = dict(sorted((killer.hit - before).items()))
            show(f"{trainer.run}: killed {kills}, {found.attempts} attempts, {trainer.starts} starts of the flow's process, "
                 f"{found.garbage} checkpoints never committed, {found.quarantined} damaged")  # fmt: skip
            show(f"  {'; '.join(told)}; log in {keep(trainer.log)}" if told else "  as undisturbed")
    finally:
        if place.server is not None:
            place.server.kill()
    minutes = (time.monotonic() - started) / 60
    kills = dict(sorted(killer.hit.items()))
    show(f"{options.storage}: {killer.hit.total()} kills {kills}, {rounds} trainings of {CONFIG['epochs']} epochs, {attempts} "
         f"attempts, {restarts} restarts of the flow's process, {minutes:.1f} min")  # fmt: skip
    return problems


def keep(log: Path) -> str:
    kept = Path(tempfile.mkdtemp(prefix="soak-log-")) / "log"
    kept.write_bytes(log.read_bytes())
    return str(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=["local", "s3"], default="s3")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_once(*options.train)
        return 0
    lines = []

    def show(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    mark = os.environ[MARK] = uuid.uuid4().hex
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))).resolve()
        from chaos import prefect_server

        os.environ["PREFECT_API_URL"] = stack.enter_context(prefect_server(scratch))
        problems = soak(options, scratch, show)
    problems += [f"left behind: {command}" for command in left_behind(mark)]
    lines += problems or ["every training ended as the undisturbed one; no process is left"]
    write_results(f"soak_{options.storage}.txt", 1, lines)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
