"""The program itself: its commands, loaded when asked for, and what it says and returns when something is wrong."""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress

import click
from prefect_torch.ckpt.errors import CheckpointError

from .terminal import INTERRUPTED, abandon_output, plain

NAME = "prefect-torch"
_MODULES = {
    "ls": "runs.list_command",
    "show": "runs.show_command",
    "best": "runs.best_command",
    "diff": "runs.diff_command",
    "verify": "runs.verify_command",
    "pull": "runs.pull_command",
    "pin": "runs.pin_commands",
    "unpin": "runs.pin_commands",
    "restore": "runs.restore_command",
    "prune": "runs.prune_command",
    "doctor": "doctor.doctor_command",
    "migrate-check": "ray.migrate_check_command",
    "execute": "execute_command",
}


class _Commands(click.Group):
    """Loads a command's module only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which one meets them."""
        del ctx
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None where there is none of that name."""
        del ctx
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f".{_MODULES[cmd_name]}", __package__)
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a reader that has seen enough, as `head` has, is no error."""
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
    """Look at the runs of trainings and their checkpoints, and look after them.

    STORAGE is what trainings were given: a local path, a URL (s3://bucket/folder, gs://, az://), or
    "block-type-slug/block-name". ID is a checkpoint's id or the beginning of one, "latest", or "best" (by --metric, or by the
    metric that the training ranks its checkpoints with).

    With --json a command prints the keys that its help names; a float that strict JSON cannot hold is
    {"__float__": "nan"}, "inf" or "-inf". A command exits with 0 when all is well, 1 when something is not, 2 when it was
    called wrongly, 130 after Ctrl-C.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; what is wrong is told in one line on stderr.

    Args:
        arguments: What stands behind the program's name; the process's own if None.

    """
    try:
        outcome = prefect_torch.main(arguments, prog_name=NAME, standalone_mode=False)
    except click.ClickException as exc:
        usage = f"; see {exc.ctx.command_path} --help" if isinstance(exc, click.UsageError) and exc.ctx else ""
        return _fail(f"{exc.format_message().rstrip('.')}{usage}", exc.exit_code)
    except click.Abort as exc:
        if isinstance(exc.__cause__ or exc.__context__, KeyboardInterrupt):
            return _fail("interrupted", INTERRUPTED)
        return _fail("nobody answered, so nothing was done", 1)
    except (CheckpointError, ValueError, OSError) as exc:
        advice = "; run it as somebody who may, or give credentials" if isinstance(exc, PermissionError) else ""
        return _fail(f"{exc}{advice}", 1)
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """Be the console script."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal that cannot show all
    sys.exit(run())


def _fail(message: str, exit_code: int) -> int:
    with suppress(BrokenPipeError):  # `2>&1 | head`
        click.echo(f"{NAME}: {plain(message)}", err=True)
    return exit_code
