"""Restarts Prefect's embedded server whenever it dies before its process ends."""

import atexit
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING

from prefect.settings import get_current_settings
from prefect_torch.tasks.prefect_api.settings import using
from prefect_torch.tasks.run_logs import get_run_logger

from .tying import embedded_servers, restarting

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

_POLL_S = 1.0
_MAX_RESTARTS = 3  # within the period; whatever ended the server that often would end it again
_RESTART_PERIOD_S = 600.0
_left: set[threading.Event] = set()  # they end the keepers whose bodies have ended


class ServerKeeper:
    """Restarts an embedded server that died, at the same port and with the same database.

    Attributes:
        has_given_up: Whether the server died too often to be restarted once more.

    """

    def __init__(self) -> None:
        self.has_given_up = False
        self._restarts_s: deque[float] = deque(maxlen=_MAX_RESTARTS)

    def keep(self, ended: threading.Event) -> None:
        """Restart the servers of this process that die until `ended` is set."""
        while not ended.wait(_POLL_S) and not self.has_given_up:
            for server in embedded_servers():
                process = server.server_process
                with restarting:
                    if process is not None and process.poll() is not None and server.server_process is process:
                        self._restart(server, process.returncode)

    def _restart(self, server: "SubprocessASGIServer", returncode: int) -> None:
        now_s = time.monotonic()
        if len(self._restarts_s) == _MAX_RESTARTS and now_s - self._restarts_s[0] < _RESTART_PERIOD_S:
            self.has_given_up = True
            return
        self._restarts_s.append(now_s)
        get_run_logger().warning("Prefect's embedded server has died (exit code %d): starting it again", returncode)
        try:
            server.server_process = server._run_uvicorn_command()  # noqa: SLF001 - `start` waits, and takes another port
        except (OSError, RuntimeError) as exc:  # the latter for a database that a newer Prefect has migrated meanwhile
            get_run_logger().warning("Prefect's embedded server cannot be started: %s", exc)


@contextmanager
def embedded_server_kept_running() -> Iterator[ServerKeeper]:
    """Restart this process's embedded server whenever it dies, until the process ends; costs nothing with a separate server.

    The flow's end needs it after the body: Prefect waits for minutes to send the final state and the last log lines.
    """
    _end_keepers()
    keeper, ended = ServerKeeper(), threading.Event()
    if not embedded_servers():
        yield keeper
        return
    # In this context, so that the server gets Prefect's current settings and log lines go to this flow run.
    thread = threading.Thread(target=copy_context().run, args=(keeper.keep, ended), daemon=True)
    thread.start()
    try:
        yield keeper
    finally:
        ended.set()
        thread.join()
        _keep_on(keeper)


def _keep_on(keeper: ServerKeeper) -> None:
    """Restart the servers that die until a body like the one that has ended begins, or Prefect stops the server at exit.

    Not in this context, which would keep the flow run's result, and whose log lines Prefect refuses once the process ends.
    """
    settings, ended = get_current_settings(), threading.Event()

    def keep() -> None:
        with using(settings):
            keeper.keep(ended)

    _left.add(ended)
    atexit.unregister(_end_keepers)
    atexit.register(_end_keepers)  # the last to be registered runs first: before Prefect stops a server
    with suppress(RuntimeError):  # no thread is left: the flow ends all the same, unless its server dies just then
        threading.Thread(target=keep, daemon=True).start()


def _end_keepers() -> None:
    for ended in tuple(_left):
        ended.set()
        _left.discard(ended)
