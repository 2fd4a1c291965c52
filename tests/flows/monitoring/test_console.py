"""What a person sees at the terminal that a training was started from, and that nothing else sees any of it."""

import io
import logging
import os
import pty
import re
import signal
import sys
import termios
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_programs import Popen
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL
from prefect_servers import assert_ranks_ended
from prefect_torch.ckpt import CheckpointStore, Plan
from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome, read_outcomes
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.flows import Result
from prefect_torch.flows.calls.log_filter import shorten_logs
from prefect_torch.flows.monitoring.console import console_progress
from prefect_torch.tasks.training.observers import AttemptEnded, AttemptStarted, CheckpointQuarantined, CheckpointsPruned

SUPPORT = Path(__file__).parents[2] / "support"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LOGGER = logging.getLogger("prefect.flow_runs")
ID = "000001-00000012-0123abcd"
FIRST = Attempt(1, "token", Owner.current(), 2, None, 1, "2026-01-01T00:00:00+00:00")
SECOND = Attempt(2, "token", Owner.current(), 2, None, 1, "2026-01-01T00:00:00+00:00")


class Terminal:
    """A terminal with nobody at it, and all that was written to it."""

    def __init__(self):
        self._master, self.slave = pty.openpty()
        attributes = termios.tcgetattr(self.slave)
        attributes[3] |= termios.NOFLSH  # else Ctrl-C discards what has not been read yet
        termios.tcsetattr(self.slave, termios.TCSANOW, attributes)
        self._written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        try:
            while more := os.read(self._master, 65536):
                self._written += more
        except OSError:  # how Linux says that nobody has it open any more
            pass

    def type(self, text):
        os.write(self._master, text.encode())

    def raw(self):
        return self._written.decode(errors="replace")

    def text(self):
        return ESCAPE.sub("", self.raw())

    def wait_for(self, pattern, longest_s=120):
        deadline_s = time.monotonic() + longest_s
        while not re.search(pattern, self.text()):
            assert time.monotonic() < deadline_s, self.text()
            time.sleep(0.05)

    def hang_up(self):
        self._reader.join(60)
        assert not self._reader.is_alive()
        os.close(self._master)


@contextmanager
def logging_to(handler):
    others, LOGGER.handlers, LOGGER.propagate = LOGGER.handlers, [handler], False
    try:
        yield
    finally:
        LOGGER.handlers, LOGGER.propagate = others, True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("LINES", "40")
    opened = Terminal()
    with os.fdopen(opened.slave, "w") as stream, logging_to(PrefectConsoleHandler(stream)):
        yield opened
    opened.hang_up()


def told(step, progress=None, **metrics):
    return ReportEvent(MetricRecord(1, step, metrics, None, "2026-01-01T00:00:00+00:00"), progress)


def shown_at_last(terminal, events):
    (observer,) = console_progress("digits")
    observer.observe(AttemptStarted(FIRST, None))
    observer.refresh(final=False)
    for event in events:
        observer.observe(event)
    LOGGER.warning("the end of what went before")
    observer.refresh(final=True)
    LOGGER.warning("the beginning of what comes after")
    terminal.wait_for("comes after")
    assert terminal.text().count("the end of what went before\r\n") == 1
    shown = terminal.text().rpartition("the end of what went before")[2].partition("the beginning")[0]
    return [line.rstrip() for line in shown.splitlines() if line.strip()]


def is_erased(terminal, line):
    """Return whether the lines that were last drawn, of which `line` is the lowest, were erased after that."""
    _, drawn, later = terminal.raw().rpartition(line)
    assert drawn
    return re.match(r"[^\x1b]*(\x1b\[0m)?\s*(\x1b\[\?25h)?\r?(\x1b\[1A\x1b\[2K)+", later) is not None


def test_progress_is_a_bar_with_the_newest_metrics(terminal):
    bar, metrics = shown_at_last(
        terminal, [told(1, 0.0, loss=1.0), told(12, 0.25, loss=0.5, val={"accuracy": 0.75}, epoch=3, done=True)]
    )[-2:]
    assert re.fullmatch(r"digits ━+╸? *━+ +25%  step 12  2 reports  \d+(\.\d)? s  \d.* left", bar), bar
    assert metrics == "loss 0.5  val/accuracy 0.75  epoch 3  done True"


def test_of_several_trainings_each_is_shown_until_its_own_end(terminal):
    (first,), (second,), (third,) = map(console_progress, ["first", "second", "third"])
    for observer in (first, second):
        observer.observe(AttemptStarted(FIRST, None))
        observer.refresh(final=False)
    first.observe(told(5, loss=1.0))
    first.refresh(final=True)
    second.observe(told(7, loss=0.5))
    terminal.wait_for("second  step 7", longest_s=60)
    third.observe(AttemptStarted(FIRST, None))
    third.refresh(final=False)
    third.observe(told(8, loss=0.25))
    terminal.wait_for("third  step 8", longest_s=60)
    for observer in (second, third):
        observer.refresh(final=True)
    LOGGER.warning("the end")
    terminal.wait_for("the end")
    shown = terminal.text()
    assert shown.index("first  step 5") < shown.index("second  step 7") < shown.index("third  step 8")
    assert re.search(r"third  step 8[^\n]*\n\s*loss 0.25\s*the end", shown)


def test_reports_are_counted_where_a_training_tells_no_progress(terminal):
    bar, metrics = shown_at_last(terminal, [told(7, loss=1.0)])[-2:]
    assert re.fullmatch(r"digits  step 7  1 report  \d+(\.\d)? s", bar), bar
    assert metrics == "loss 1"


def test_what_becomes_of_checkpoints_and_attempts_is_shown(terminal):
    failed = Outcome(1, "failed", None, "infrastructure", "rank 1 died: no memory\n\nTraceback: ...")
    lines = shown_at_last(
        terminal,
        [
            told(12),
            CommitEvent(ID, 12, {}, 3 * 2**20, 1.25),
            CommitEvent(ID, 12, {}, 3 * 2**20, 1.25),
            CheckpointsPruned(Plan({}, ("one",))),
            CheckpointQuarantined(ID, "model.pt differs"),
            AttemptEnded(failed),
            AttemptStarted(SECOND, f"s3://bucket/digits/checkpoints/{ID}"),
        ],
    )
    assert lines[-5].startswith("digits attempt 2  step 12")
    assert lines[-4:] == [
        f"checkpoint {ID}  step 12  3.0 MiB in 1.2 s  (2 committed, 1 pruned)",
        f"checkpoint {ID} is damaged and set aside: model.pt differs",
        "attempt 1 failed: rank 1 died: no memory",
        f"attempt 2 resumes from {ID}",
    ]


def test_the_bar_of_a_training_that_was_terminated_is_removed(terminal):
    terminated = Outcome(1, "preempted", None, "preemption", "terminated (Ctrl-C)")
    shown_at_last(terminal, [told(12), AttemptEnded(terminated)])
    assert is_erased(terminal, "attempt 1 preempted")


def test_the_bar_of_a_training_that_ended_otherwise_stays(terminal):
    shown_at_last(terminal, [told(12), AttemptEnded(Outcome(1, "completed"))])
    assert not is_erased(terminal, "attempt 1 completed")


def test_a_line_never_grows_over_the_edge_of_the_terminal(terminal):
    lines = shown_at_last(terminal, [told(1, 0.5, **{f"metric_{number}": 1.0 for number in range(50)})])
    assert lines[-1].endswith("…")
    assert max(map(len, lines)) <= 160


def test_what_is_printed_meanwhile_goes_to_where_it_was_going(terminal, monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    (observer,) = console_progress("digits")
    observer.observe(told(1))
    observer.refresh(final=False)
    print("a result for a pipe")
    observer.refresh(final=True)
    assert output.getvalue() == "a result for a pipe\n"
    assert sys.stdout is output
    assert "a result" not in terminal.text()


@pytest.mark.parametrize(
    "where", ["a terminal", "a file", "a file, colours forced", "a dumb terminal", "a deployment", "other log lines"]
)
def test_only_a_terminal_of_prefects_own_log_lines_is_written_to(where, monkeypatch):
    monkeypatch.setenv("TERM", "dumb" if "dumb" in where else "xterm")
    if where == "a deployment":
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "an-id")
    if "forced" in where:
        monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = Terminal()
    with os.fdopen(terminal.slave, "w") as slave:
        stream = io.StringIO() if "a file" in where else slave
        with logging_to(logging.StreamHandler(stream) if "other" in where else PrefectConsoleHandler(stream)):
            assert len(console_progress("digits")) == (where == "a terminal")
    terminal.hang_up()


def test_a_training_at_a_terminal_is_shown_and_ctrl_c_leaves_the_terminal_in_order(tmp_path):
    terminal = Terminal()
    process = Popen(
        ["setsid", "--ctty", sys.executable, str(SUPPORT / "console_training.py"), str(tmp_path)],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40",
             "PYTHONPATH": str(SUPPORT), "PREFECT_API_URL": PREFECT_API_URL.value()},
    )  # fmt: skip
    os.close(terminal.slave)
    try:
        terminal.wait_for(r"checkpoint 000001-\S+  step \d+  \d+ B in \S+ s  \(\d+ committed")
        terminal.type("\x03")
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        terminal.hang_up()
    assert re.search(r"digits  step \d+  \d+ reports", terminal.text()), terminal.text()
    assert "press Ctrl-C again to end immediately" in terminal.text()
    (outcome,) = read_outcomes(CheckpointStore.open(tmp_path, "digits"))
    assert_ranks_ended(outcome.flow_run_id, rank_0="Completed")  # by itself, with its last checkpoint
    newest = Result.from_storage(tmp_path, "digits").checkpoint.id
    (sentence,) = re.findall(r"attempt 1: terminated \(Ctrl-C\); .*", terminal.text())
    assert f"work is safe up to step {int(newest[7:15])} ({newest}), where the next training named 'digits'" in sentence
    assert not re.search("prune-digits|Crash detected|hook", terminal.text()), terminal.text()
    assert not re.search("Traceback|KeyboardInterrupt", terminal.text()), "the sentence says it"
    lines = re.findall(r".*the line of epoch (\d+) is whole.*", terminal.text())
    assert lines == [str(epoch) for epoch in range(len(lines))], "each once, on a line of its own"
    assert terminal.raw().rindex("\x1b[?25h") > terminal.raw().rfind("\x1b[?25l"), "the cursor is shown again"
    after = terminal.text().rpartition(sentence)[2]
    assert is_erased(terminal, "attempt 1 preempted"), "the bar of a training that was terminated is gone"
    assert "Task run 'train-digits' - Finished in state" not in after
    assert process.returncode == -signal.SIGINT


def test_a_console_that_nobody_reads_any_longer_ends_no_flow():
    reading, writing = os.pipe()
    logger = logging.getLogger("prefect")
    with os.fdopen(writing, "w") as stream:
        handler = PrefectConsoleHandler(stream)
        logger.addHandler(handler)
        try:
            shorten_logs()
            os.close(reading)
            logger.warning("nobody reads this")
            logger.warning("nor this")
        finally:
            logger.removeHandler(handler)
    assert handler.console.quiet
