"""Errors of Prefect's API about a flow run, in a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect_torch.ckpt.text import without_login


@contextmanager
def flow_run_errors_explained(flow_run_id: UUID) -> Iterator[None]:
    """Replace the errors of requests about a flow run by one sentence, which names the API.

    Raises:
        FileNotFoundError: If the API does not know the flow run.
        ConnectionError: If the API does not answer.

    """
    api = without_login(PREFECT_API_URL.value() or "the server of this machine")
    try:
        yield
    except ObjectNotFound as exc:
        raise FileNotFoundError(f"{api} has no flow run {flow_run_id}: set PREFECT_API_URL to the API that has it") from exc
    except (httpx.HTTPError, RuntimeError) as exc:
        raise ConnectionError(without_login(f"{api} does not answer: {exc or type(exc).__name__}")) from exc
