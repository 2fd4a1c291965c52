"""Prefect's settings: changed for a part of a process, as by `temporary_settings`, without its 40 ms of CPU; and judged."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from prefect.context import SettingsContext, get_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, Settings, get_current_settings
from pydantic import BaseModel


def settings_with(changes: Mapping[Any, Any]) -> Settings:
    """Return Prefect's current settings with other values of some; the environment is not read again.

    Args:
        changes: The values, of the settings' types, by Prefect's settings, such as PREFECT_CLIENT_MAX_RETRIES; none from which
            Prefect derives others, as it derives the UI's address from PREFECT_API_URL.

    """
    settings = get_settings_context().settings
    for setting, value in changes.items():
        settings = _replace(settings, setting.accessor.split("."), value)
    return settings


def settings_with_defaults(defaults: Mapping[Any, Any]) -> Settings:
    """Return Prefect's current settings with the given values of those that the user has not set; see `settings_with`."""
    return settings_with({setting: value for setting, value in defaults.items() if not _is_set(setting.accessor.split("."))})


@contextmanager
def using(settings: Settings) -> Iterator[None]:
    """Let `settings` be Prefect's in the body, in this thread and in others that copy its context."""
    with SettingsContext(profile=get_settings_context().profile, settings=settings):
        yield


def without_retries() -> AbstractContextManager[None]:
    """Let every request to Prefect's API in the body be made once."""
    return using(settings_with({PREFECT_CLIENT_MAX_RETRIES: 0}))


def without_empty_url() -> AbstractContextManager[None]:
    """Let a PREFECT_API_URL that is empty, as compose files and CI set it, count as not set in the body.

    Prefect's client starts a server then, but the code that sends events takes the empty text for an address: the states of
    task runs are lost, with a traceback each.
    """
    return using(settings_with({PREFECT_API_URL: None})) if PREFECT_API_URL.value() == "" else nullcontext()


def unusable_home() -> tuple[str, str] | None:
    """Return why no embedded server can keep its database in Prefect's home directory, and the advice; None if it can."""
    settings = get_current_settings()
    home, url = settings.home, settings.server.database.connection_url
    nearest = next(it for it in (home, *home.parents) if os.access(it, os.F_OK))  # where the server would make it
    if url is None or str(home) not in url.get_secret_value() or os.access(nearest, os.W_OK | os.X_OK):
        return None
    why = (
        "Prefect's server, which a flow starts unless PREFECT_API_URL names another, cannot keep its database in "
        f"{home}, where this user cannot write"
    )
    return why, "set PREFECT_HOME to a directory that can be written to, or PREFECT_API_URL"


def unused_key() -> tuple[str, str] | None:
    """Return that PREFECT_API_KEY is not used without PREFECT_API_URL, and the advice; None if that is not the case."""
    api = get_current_settings().api
    if api.key is None or api.url:
        return None
    why = (
        "PREFECT_API_KEY is set, but PREFECT_API_URL is not, so flow runs are recorded by a server on this machine and not in "
        "Prefect Cloud"
    )
    return why, "set PREFECT_API_URL too, or log in (prefect cloud login)"


def _replace(model: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of a model in which the attribute at `path` is `value`."""
    assert isinstance(model, BaseModel)
    head, *rest = path
    inner = _replace(getattr(model, head), rest, value) if rest else value
    return model.model_copy(update={head: inner})


def _is_set(path: Sequence[str]) -> bool:
    *groups, name = path
    model: Any = get_settings_context().settings
    for group in groups:
        model = getattr(model, group)
    assert isinstance(model, BaseModel)
    return name in model.model_fields_set
