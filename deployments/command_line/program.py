"""The program: its commands, loaded on demand, and the messages and exit codes of its errors."""

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import click
from prefect_torch.ckpt.errors import CheckpointError

from .terminal import INTERRUPTED, abandon_output, note, plain

NAME = "prefect-torch"
_MODULES = {
    "ls": "runs.list_command",
    "show": "runs.show_command",
    "watch": "reports.watch_command",
    "metrics": "reports.metrics_command",
    "logs": "runs.logs_command",
    "best": "runs.best_command",
    "diff": "runs.diff_command",
    "verify": "runs.verify_command",
    "pull": "runs.pull_command",
    "pin": "runs.keep_commands",
    "unpin": "runs.keep_commands",
    "restore": "runs.keep_commands",
    "prune": "runs.prune_command",
    "copy": "upkeep.copy_command",
    "delete": "upkeep.delete_command",
    "plan": "runs.plan_command",
    "doctor": "doctor.doctor_command",
    "migrate-check": "ray.migrate_check_command",
    "execute": "execute_command",
    "agent": "agent_command",
}


class _Commands(click.Group):
    """Loads the module of a command on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        del ctx
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None if there is no command of that name."""
        del ctx
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f".{_MODULES[cmd_name]}", __package__)
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a reader that closes the pipe early, such as `head`, is no error."""
        try:
            exit_code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            return abandon_output()
        return exit_code


@click.command(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=NAME, prog_name=NAME)
@click.pass_context
def prefect_torch(ctx: click.Context) -> None:
    """List, inspect and maintain the runs of trainings and their checkpoints.

    STORAGE is the storage of the trainings: a local path, a URL (s3://bucket/prefix, gs://, az://), or
    "block-type-slug/block-name". ID is a checkpoint's id or the beginning of one, "latest", or "best" (by --metric, or by
    the training's own score).

    With --json a command prints the keys that its help names; a float that strict JSON cannot represent is
    {"__float__": "nan"}, "inf" or "-inf". Exit codes: 0 for success, 1 for an error or a negative result, 2 for wrong usage,
    130 after Ctrl-C.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; an error is one line on stderr.

    Args:
        arguments: The arguments without the program's name; those of the process if None.

    """
    try:
        with _warnings_on_stderr():
            outcome = prefect_torch.main(arguments, prog_name=NAME, standalone_mode=False)
    except click.ClickException as exc:
        usage = f"; see {exc.ctx.command_path} --help" if isinstance(exc, click.UsageError) and exc.ctx else ""
        return _fail(f"{exc.format_message().rstrip('.')}{usage}", exc.exit_code)
    except click.Abort as exc:
        if isinstance(exc.__cause__ or exc.__context__, KeyboardInterrupt):
            return _fail("interrupted", INTERRUPTED)
        return _fail("there was no answer, so nothing was done", 1)
    except (CheckpointError, ValueError, OSError) as exc:
        is_of_system = isinstance(exc, PermissionError) and exc.errno is not None  # the storages' own errors say what to do
        advice = "; run it as a user with access, or give credentials" if is_of_system else ""
        return _fail(f"{exc}{advice}", 1)
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """Run the console script."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal without some characters
    if (exit_code := run()) == INTERRUPTED:
        with suppress(OSError):  # nobody reads it
            sys.stdout.flush()
        os._exit(exit_code)  # threads that read or write the storage cannot be stopped, and a normal exit would wait for them
    sys.exit(exit_code)


def _open_missing_streams() -> None:
    """Discard what goes to a stream that the caller has closed (`>&-`), and let no later file take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Print the package's warnings, such as checkpoints that are left out, each in one line without control characters."""
    logger, notes = logging.getLogger("prefect_torch"), _Notes(logging.WARNING)
    logger.addHandler(notes)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(notes)


def _fail(message: str, exit_code: int) -> int:
    with suppress(BrokenPipeError):  # `2>&1 | head`
        click.echo(f"{NAME}: {plain(message)}", err=True)
    return exit_code
