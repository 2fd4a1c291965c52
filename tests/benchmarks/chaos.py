"""Kill a training at every file event of a save, a prune and a resume, start it again, and judge what came of it.

    python tests/benchmarks/chaos.py [--quick] [--ranks N ...] [--how HOW ...] [--every K] [--flow-points N]

A referee from outside: nothing is mocked. `injected/file_faults.py` counts the file events of the real processes below the
storage folder; one run records them, and then each event of each process (the leader and every rank) is died at, in every way
that file_faults tells. The training (`exact_training.py`) returns a digest of all its state. Whatever was killed is started
again, and judged:

    hard       the restart did not complete
    silent     its final state differs, bit for bit, from that of the run that nobody disturbed
    lost       the restart did not resume from the newest checkpoint whose manifest was on disk at the kill, or whose report had
               returned by then, nor from a newer one
    kept       storage holds other checkpoints at the end than it does after the undisturbed run

Most points run on forked processes (`forked_gang.py`), where the whole gang dies at that moment, as a machine does. The rows
"flow" run through `prefect_torch.flows.train`, where one process dies alone: a rank, which the flow retries, or the flow's own
process, which is started again. Exits with 1 unless every fault fired and every count is zero. The whole of it, without
--quick, --ranks, --how and --every, writes its table to tests/benchmarks/results/chaos.txt.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "injected")]

from file_faults import VARIABLE, Fault, Plan, name_of  # noqa: E402 - found by the line above
from prefect_torch.ckpt.runs.manifest import step_of  # noqa: E402 - here and above
from result_file import write_results  # noqa: E402

EPOCHS, BATCHES = 3, 3
RECORDINGS = 3
MOST_TRIES = 6  # a run may still lack an event of the recorded ones: it is left to a race
QUICK_POINTS = 16
TRAIN_FN = f"{HERE / 'exact_training.py'}:train_exactly"
RANKS = (1, 2)
HOWS = ("before", "after", "half", "cut")
PROBLEMS = ("hard", "silent", "lost", "kept")


@dataclass(frozen=True)
class Point:
    """Where and how to die: in a training that starts fresh, or in one that resumes what a killed one left."""

    path: str
    world_size: int
    begins: str
    step: str
    fault: Fault


@dataclass(frozen=True)
class Reference:
    """What the run that nobody disturbed ended with."""

    digest: str
    kept_steps: tuple[int, ...]


class Referee:
    """Runs points and counts what came of them."""

    def __init__(self, scratch: Path) -> None:
        import exact_training

        self.scratch = scratch
        self.data = str(scratch / "digits.pt")
        exact_training.write_digits(self.data)
        self.references: dict[int, Reference] = {}
        self.table: dict[tuple, Counter] = {}
        self.failures: list[str] = []

    def training(self, world_size: int, name: str):
        from forked_gang import Training

        config = {"epochs": EPOCHS, "batches": BATCHES, "data": self.data}
        config["acknowledged"] = str(self.scratch / name / "acknowledged")
        training = Training(self.scratch / name, TRAIN_FN, config, world_size)
        shutil.rmtree(training.folder, ignore_errors=True)
        training.storage.mkdir(parents=True)
        return training

    def record(self, world_size: int, template: Path | None = None) -> list[dict]:
        """Return every file event of an undisturbed run, from scratch or from what `template` holds.

        Ranks, and threads of a rank, race for making a folder, which costs the loser a few events more: of some runs, those
        events count that all of them have, and the making itself only where nobody else does it.
        """
        runs = [self._record(world_size, template) for _ in range(RECORDINGS)]
        in_all = set.intersection(*({fault_at(event) for event in events} for events in runs))
        return [event for event in runs[0] if (fault := fault_at(event)) in in_all and not is_raced_for(fault, world_size)]

    def _record(self, world_size: int, template: Path | None) -> list[dict]:
        from forked_gang import run_attempt

        training = self.training(world_size, "recorded")
        if template is not None:
            shutil.copytree(template, training.storage, dirs_exist_ok=True)
        record = training.folder / "events"
        code = run_attempt(training, Plan(str(training.storage), record=str(record)))
        assert code == 0, training.log.read_text()
        found = Reference((training.folder / "returned").read_text(), kept_steps(training.storage))
        assert self.references.setdefault(world_size, found) == found, "the training itself is not deterministic"
        return read_events(record)

    def judge(self, point: Point, template: Path | None) -> None:
        """Die at `point`, start again, and note the outcome."""
        for _ in range(MOST_TRIES):
            problems = self._try(point, template)
            if problems is not None:
                break
        else:
            self.fail(f"{point}: the fault did not fire")
            problems = ["not fired"]
        self.count(point, problems)

    def count(self, point: Point, problems: list[str]) -> None:
        row = self.table.setdefault((point.path, point.world_size, point.step, point.fault.how), Counter())
        row.update({"points": 1, **dict.fromkeys(problems, 1)})

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(text, flush=True)

    def _try(self, point: Point, template: Path | None) -> list[str] | None:
        from forked_gang import run_attempt

        training = self.training(point.world_size, "judged")
        if template is not None:
            shutil.copytree(template, training.storage, dirs_exist_ok=True)
        fired = training.folder / "fired"
        run_attempt(training, dying(training, point.fault, whole_group=True))
        if not fired.exists():
            return None
        code = run_attempt(training, Plan(str(training.storage)))
        returned = (training.folder / "returned").read_text() if code == 0 else None
        return self.verdict(point, returned, fired, training)

    def verdict(self, point: Point, returned: str | None, fired: Path, training) -> list[str]:
        told = json.loads(fired.read_text())
        committed, acknowledged = told["committed"], max(told["acknowledged"], default=-1)
        resumed = resumed_id(training.storage)
        reference = self.references[point.world_size]
        wrong = {
            "hard": returned is None,
            "silent": returned is not None and returned != reference.digest,
            "lost": resumed < max(committed, default="") or (step_of(resumed) if resumed else -1) < acknowledged,
            "kept": returned is not None and kept_steps(training.storage) != reference.kept_steps,
        }
        problems = [name for name in PROBLEMS if wrong[name]]
        if problems:
            saved = Path(tempfile.mkdtemp(prefix="chaos-failure-")) / "training"
            shutil.copytree(training.folder, saved)
            self.fail(f"{', '.join(problems)}: {point}, resumed from {resumed!r} after {told}; see {saved}")
        return problems


def kept_steps(storage: Path) -> tuple[int, ...]:
    from prefect_torch.ckpt import CheckpointStore

    return tuple(manifest.step for manifest in CheckpointStore.open(storage, "run").list())


def resumed_id(storage: Path) -> str:
    """Return the id that the newest attempt restored; empty where it began from zero."""
    from prefect_torch.ckpt import CheckpointStore
    from prefect_torch.ckpt.runs.attempts.attempt import newest_attempt

    newest = newest_attempt(CheckpointStore.open(storage, "run"))
    return "" if newest is None or newest.resumed_from is None else newest.resumed_from.rpartition("/")[2]


def is_raced_for(fault: Fault, world_size: int) -> bool:
    makes_folder = fault.event.startswith("mkdir ")
    return makes_folder and fault.role != "leader" and (world_size > 1 or fault.number > 1)


def dying(training, fault: Fault, *, whole_group: bool):
    """Return the plan to die of `fault`."""
    return Plan(
        str(training.storage),
        fault=fault,
        fired=str(training.folder / "fired"),
        acknowledged=str(training.acknowledged),
        whole_group=whole_group,
    )


def read_events(record: Path) -> list[dict]:
    """Return the recorded events, numbered per process and name."""
    events = [json.loads(line) for line in record.read_text().splitlines()]
    unseen = [event for event in events if event["kind"].startswith("unseen")]
    assert not unseen, f"file events that the injector cannot die at: {unseen}"
    counted: Counter = Counter()
    for event in events:
        event["name"] = name_of(event["kind"], event["path"])
        counted[event["role"], event["name"]] += 1
        event["number"] = counted[event["role"], event["name"]]
    return events


def fault_at(event: dict, how: str = "before") -> Fault:
    return Fault(event["role"], event["name"], event["number"], how)


def points_of(events: list[dict], path: str, world_size: int, begins: str) -> Iterator[Point]:
    """Yield every way to die at every event; a call that only reads leaves the same behind before and after."""
    for event in events:
        ways = ["before"]
        if event["kind"] not in {"open", "scandir"}:
            ways += ["after", "cut"]
        if event["unsynced"]:
            ways += ["half"]
        for how in ways:
            yield Point(path, world_size, begins, event["step"], fault_at(event, how))


def spread(points: list[Point], count: int) -> list[Point]:
    """Return `count` points at equal distances."""
    count = min(count, len(points))
    return [points[(2 * number + 1) * len(points) // (2 * count)] for number in range(count)]


def leave_half_a_save(referee: Referee, world_size: int, events: list[dict]) -> Path:
    """Return a storage folder of a training that died after a prune, while it wrote the data of its last checkpoint."""
    from forked_gang import run_attempt

    *_, last_but_one, _ = (event for event in events if event["role"] == "rank 0" and event["kind"] == "rename")
    for _ in range(MOST_TRIES):
        training = referee.training(world_size, f"half-{world_size}")
        fired = training.folder / "fired"
        run_attempt(training, dying(training, fault_at(last_but_one), whole_group=True))
        if fired.exists() and len(json.loads(fired.read_text())["committed"]) < EPOCHS:
            return training.storage
    raise AssertionError("no training died in its last save")


def forked_points(referee: Referee, world_size: int) -> list[tuple[Point, Path | None]]:
    fresh = referee.record(world_size)
    half = leave_half_a_save(referee, world_size, fresh)
    resumed = referee.record(world_size, half)
    return [
        *((point, None) for point in points_of(fresh, "forked", world_size, "fresh")),
        *((point, half) for point in points_of(resumed, "forked", world_size, "resumed")),
    ]


@contextmanager
def prefect_server(scratch: Path):
    """Yield the URL of a Prefect server: the one that the environment names, else one for the time being."""
    if "PREFECT_API_URL" in os.environ:
        yield os.environ["PREFECT_API_URL"]
        return
    os.environ["PREFECT_HOME"] = str(scratch / "prefect")
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"  # else it tries to reach beyond loopback
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield PREFECT_API_URL.value()


class Flows:
    """The same training through `train`, in a process of its own that is started again when it was killed."""

    def __init__(self, referee: Referee, server: str) -> None:
        self.referee = referee
        self.server = server

    def run(self, training, plan: Plan) -> str | None:
        """Run the flow once, watched as `plan` says; return what the training returned, or None."""
        environment = {
            **os.environ,
            "PREFECT_API_URL": self.server,
            "PYTHONPATH": os.pathsep.join([str(HERE / "injected"), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
            VARIABLE: plan.encode(),
            "PREFECT_INTEGRATIONS_TORCH_FORK_RANKS": "false",  # faults are injected where an interpreter starts
        }
        with training.log.open("ab") as log:
            command = [sys.executable, __file__, "--train", str(training.storage), str(training.world_size)]
            done = subprocess.run([*command, json.dumps(training.config), str(training.folder / "returned")],
                                  env=environment, stdout=log, stderr=log, timeout=300, check=False)  # fmt: skip
        return (training.folder / "returned").read_text() if done.returncode == 0 else None

    def record(self, world_size: int) -> list[dict]:
        training = self.referee.training(world_size, "flow-recorded")
        record = training.folder / "events"
        returned = self.run(training, Plan(str(training.storage), record=str(record)))
        assert returned == self.referee.references[world_size].digest, training.log.read_text()[-4000:]
        return [event for event in read_events(record) if not is_raced_for(fault_at(event), world_size)]

    def judge(self, point: Point) -> None:
        for _ in range(MOST_TRIES):
            training = self.referee.training(point.world_size, "flow-judged")
            fired = training.folder / "fired"
            plan = dying(training, point.fault, whole_group=False)
            returned = self.run(training, plan)
            if not fired.exists():
                continue
            if point.fault.role == "leader":
                assert returned is None, "the flow's process outlived its SIGKILL"
                returned = self.run(training, plan)
            problems = self.referee.verdict(point, returned, fired, training)
            break
        else:
            self.referee.fail(f"{point}: the fault did not fire")
            problems = ["not fired"]
        self.referee.count(point, problems)


def train_once(storage: str, world_size: str, config: str, returned: str) -> None:
    """Run the flow in this process; the file `returned` takes the digest."""
    from prefect_torch.flows import CheckpointConfig, RunConfig, ScalingConfig, train

    kept = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val_loss", checkpoint_score_order="min")
    result = train(TRAIN_FN, json.loads(config), ScalingConfig(num_workers=int(world_size)),
                   RunConfig(name="run", storage=storage), kept)  # fmt: skip
    Path(returned).write_text(result.return_value)


def show(referee: Referee, seconds: float) -> str:
    names = ("points", "hard", "silent", "lost", "kept")
    lines = [f"{'path':<7} {'ranks':>5}  {'died in':<7} {'how':<7}" + "".join(f"{name:>8}" for name in names)]
    total: Counter = Counter()
    for key, row in sorted(referee.table.items()):
        path, world_size, step, how = key
        lines.append(f"{path:<7} {world_size:>5}  {step:<7} {how:<7}" + "".join(f"{row[name]:>8}" for name in names))
        total.update(row)
    lines.append(f"{'total':<30}" + "".join(f"{total[name]:>8}" for name in names))
    lines.append(f"{total['points']} faults in {seconds / 60:.0f} min, of which {total['not fired']} did not fire")
    return "\n".join([*lines, *referee.failures])


def run_all(referee: Referee, options: argparse.Namespace, flow_points: int) -> None:
    points = [found for world_size in options.ranks for found in forked_points(referee, world_size)]
    points = [found for found in points if found[0].fault.how in options.how]
    chosen = spread(points, QUICK_POINTS) if options.quick else points[:: options.every]
    print(f"{len(chosen)} of {len(points)} points on forked processes", flush=True)
    for number, (point, template) in enumerate(chosen):
        referee.judge(point, template)
        if number % 50 == 49:
            print(f"{number + 1} done, {len(referee.failures)} failures", flush=True)
    if flow_points:
        with prefect_server(referee.scratch) as server:
            forked = [point for point, template in points if template is None]
            flow_sample(Flows(referee, server), forked, options.ranks, flow_points, quick=options.quick)


def flow_sample(flows: Flows, forked: list[Point], ranks: Sequence[int], count: int, *, quick: bool) -> None:
    """Die at `count` points per number of ranks; a quick one takes those of one forked rank, and records none."""
    for world_size in ranks[:1] if quick else ranks:
        # Of the forked run's events, the first of each name: the flow coalesces prunes, so it may have fewer.
        points = [replace(it, path="flow") for it in forked if it.world_size == world_size and it.fault.number == 1]
        if not quick:
            points = list(points_of(flows.record(world_size), "flow", world_size, "fresh"))
        points = [point for point in points if point.fault.how in {"before", "after"}]  # no machine dies here, but a process
        by_role = {role: [point for point in points if point.fault.role == role] for role in {p.fault.role for p in points}}
        roles = sorted(by_role)
        for role in roles:
            usable = by_role[role] if not quick else by_role[role][: len(by_role[role]) // 2]
            for point in spread(usable, max(1, count // len(roles))):
                flows.judge(point)
                print(f"flow: {point.fault}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample that fits into a minute")
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="of these numbers of ranks")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=HOWS, help="die in these ways")
    parser.add_argument("--every", type=int, default=1, help="take every K-th of the points on forked processes")
    parser.add_argument("--flow-points", type=int, help="how many points per number of ranks go through the flow")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_once(*options.train)
        return 0
    flow_points = options.flow_points if options.flow_points is not None else (1 if options.quick else 12)
    started = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))).resolve()
        from forked_gang import adopt_orphans

        adopt_orphans()
        referee = Referee(scratch)
        run_all(referee, options, flow_points)
    table = show(referee, time.monotonic() - started)
    is_whole = not options.quick and options.every == 1 and (*options.ranks, *options.how) == (*RANKS, *HOWS)
    if is_whole:
        write_results("chaos.txt", 1, [table])
    else:
        print(table)
    return 1 if referee.failures else 0


if __name__ == "__main__":
    sys.exit(main())
