"""Prefect's settings for a part of a process, and the clients made with them."""

import os
import subprocess
import sys

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_SSL_CERT_FILE,
    PREFECT_API_TLS_INSECURE_SKIP_VERIFY,
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_CSRF_PROTECTION_ENABLED,
    get_current_settings,
    temporary_settings,
)
from prefect_torch.flows import train
from prefect_torch.flows.calls import short_tracebacks
from prefect_torch.tasks.prefect_api.client import own_connections
from prefect_torch.tasks.prefect_api.outage import _RETRIES, _defaults
from prefect_torch.tasks.prefect_api.settings import settings_with, settings_with_defaults, using, without_retries

AWAY = "http://127.0.0.1:1/api"


def test_changed_settings_are_those_of_prefects_own_function_and_hold_in_the_body_alone():
    changes = {PREFECT_CLIENT_MAX_RETRIES: 3, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    before = get_current_settings()
    with temporary_settings(changes):
        expected = get_current_settings()
    with using(settings_with(changes)):
        assert get_current_settings().model_dump() == expected.model_dump()
        assert get_current_settings().to_environment_variables(exclude_unset=True) == expected.to_environment_variables(
            exclude_unset=True
        )
        with without_retries():
            assert (PREFECT_CLIENT_MAX_RETRIES.value(), PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value()) == (0, None)
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 3
    assert get_current_settings() is before


@pytest.mark.parametrize("own", [{}, {PREFECT_CLIENT_MAX_RETRIES: 3}, {PREFECT_CLIENT_RETRY_EXTRA_CODES: {418}}])
def test_other_defaults_are_those_of_prefects_own_function(own):
    with temporary_settings(own):
        with temporary_settings(set_defaults=_defaults()):
            expected = get_current_settings()
        with using(settings_with_defaults(_defaults())):
            assert get_current_settings().model_dump() == expected.model_dump()
            assert get_current_settings().to_environment_variables(exclude_unset=True) == expected.to_environment_variables(
                exclude_unset=True
            )


def test_changed_settings_do_not_read_the_environment_again(monkeypatch):
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 4}):
        monkeypatch.setenv("PREFECT_CLIENT_RETRY_JITTER_FACTOR", "0.987")
        with using(settings_with({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})):
            assert get_current_settings().client.retry_jitter_factor != pytest.approx(0.987)
            assert PREFECT_CLIENT_MAX_RETRIES.value() == 4


@pytest.mark.parametrize(("url", "expected"), [("", None), (AWAY, AWAY)])
def test_an_empty_url_of_the_api_is_none(url, expected, monkeypatch):
    """Prefect's client starts a server then, but what sends events took it for an address: a traceback for each of them."""
    monkeypatch.setattr(short_tracebacks, "call_for_result", lambda *_, **__: PREFECT_API_URL.value())
    with temporary_settings({PREFECT_API_URL: url}):
        assert train("module:function") == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({PREFECT_API_URL: None}, False),
        ({PREFECT_API_URL: None, PREFECT_SERVER_CSRF_PROTECTION_ENABLED: True}, True),
        ({PREFECT_API_URL: AWAY}, True),
        ({PREFECT_API_URL: None, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: True}, True),
    ],
)
def test_only_the_embedded_server_is_not_asked_for_tokens(settings, expected):
    with temporary_settings(settings), using(settings_with_defaults(_defaults())):
        assert PREFECT_CLIENT_CSRF_SUPPORT_ENABLED.value() is expected
        assert PREFECT_CLIENT_MAX_RETRIES.value() == int(os.environ.get("PREFECT_CLIENT_MAX_RETRIES", _RETRIES))


def test_clients_share_the_trusted_certificates_but_nothing_else():
    with temporary_settings({PREFECT_API_URL: AWAY}):
        first, second = (get_client(httpx_settings=own_connections(5.0), sync_client=True) for _ in range(2))
    assert first is not second
    assert own_connections(1.0)["verify"] is own_connections(2.0)["verify"]


def test_certificates_are_those_that_prefect_is_told_to_trust(tmp_path):
    other = tmp_path / "none.pem"
    with temporary_settings({PREFECT_API_SSL_CERT_FILE: str(other)}), pytest.raises(FileNotFoundError):
        own_connections(5.0)
    with temporary_settings({PREFECT_API_TLS_INSECURE_SKIP_VERIFY: True}):
        assert "verify" not in own_connections(5.0)


def test_default_retries_of_prefect_repeat_neither_a_prune_nor_a_trial():
    """A failing prune held up the end of its training for a quarter of an hour; Prefect reads the settings at the import."""
    program = (
        "from prefect_torch.flows.trials.local_trials import trial\n"
        "from prefect_torch.tasks.prune_task import prune_checkpoints\n"
        "from prefect import flow, task\n"
        "def of_a_user(): ...\n"
        "print([it.retries for it in (trial, prune_checkpoints, flow(of_a_user), task(of_a_user))])"
    )
    settings = {"PREFECT_TASKS_DEFAULT_RETRIES": "3", "PREFECT_FLOWS_DEFAULT_RETRIES": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[0, 0, 2, 3]\n"
