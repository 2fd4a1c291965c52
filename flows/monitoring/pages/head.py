"""The head of a page that is kept up to date: its state, and how new that is; also once the process behind it is gone."""

import re
from collections.abc import Iterator, Sequence

from prefect_torch.ckpt.text import as_command
from prefect_torch.flows.monitoring.text import plain_text, show_time

_RUNNING = re.compile(r"(?P<title>\A# .*\n\n)\*\*running\*\*(?P<facts>.*)\n\n(?P<as_of>As of .*? UTC).*?(?P<path> · `)")
_LEFT_S = re.compile(r" · about [^·\n]* left")
_RUNNING_ATTEMPT = re.compile(r"^(\| \d+ \|.*\|) running \|$", re.MULTILINE)


def write_head(
    name: str, state: str, facts: Sequence[str], path: str, now_s: float, storage: str | None = None
) -> Iterator[str]:
    """Yield the lines of a head.

    Args:
        name: The name of the run or sweep.
        state: Its state in a word.
        facts: What else is to be known at first sight, in Markdown.
        path: Its local path or URL.
        now_s: The current time (seconds since the epoch).
        storage: The storage, for the command by which one sees whether the process of a running one is alive.

    """
    yield from (f"# {plain_text(name)}", "", " · ".join((f"**{state}**", *facts)), "")
    updates = ", updated every 2 to 30 s while there is news" if state == "running" else ""
    if updates and storage is not None:
        updates += f"; `{as_command('show', storage, name)}` tells whether its process is alive"
    yield f"As of {show_time(now_s)} UTC{updates} · `{path}`"


def as_lost(page: str, why: str) -> str:
    """Return the page that a process which is gone has left, with the state "lost"; any page but a running one as it is.

    Args:
        page: The page.
        why: What became of the process, and of its work, in a sentence of Markdown.

    """
    head = _RUNNING.match(page)
    if head is None:
        return page
    facts = _LEFT_S.sub("", head["facts"])
    rest = _RUNNING_ATTEMPT.sub(r"\1 lost |", page[head.end() :])
    return f"{head['title']}**lost**{facts}\n\n{why}\n\n{head['as_of']}{head['path']}{rest}"
