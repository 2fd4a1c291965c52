"""The question before something is deleted for good."""

import sys

import click

from .terminal import note

yes_option = click.option("--yes", is_flag=True, help="Do not ask; required without a terminal.")


def agrees_to_delete(what: str, *, yes: bool, instead: str = "") -> bool:
    """Return whether the user agrees to a deletion; asked on stderr, where the answer "no" is noted, too.

    Args:
        what: What is deleted.
        yes: Whether the user has agreed in advance.
        instead: What to give instead of --yes where there is no terminal, such as ", or --dry-run to look".

    Raises:
        click.UsageError: If the user has not agreed, and there is no terminal.

    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError(f"there is no terminal to ask at: give --yes to delete{instead}")
    if click.confirm(f"Delete {what} for good?", err=True):
        return True
    note("nothing was deleted")
    return False
