"""Arguments and options of several commands, and the storages that they name."""

from dataclasses import replace
from pathlib import Path

import click
from prefect_torch.ckpt import Storage, StorageError
from prefect_torch.ckpt.errors import PAGE_OF_PROXY
from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.ckpt.storage.protocol import INTERACTIVE_RETRY_POLICY
from prefect_torch.ckpt.storage.specs.location import is_block_slug

storage_argument = click.argument("storage", metavar="STORAGE")
run_argument = click.argument("run", metavar="RUN")
checkpoint_argument = click.argument("checkpoint", metavar="ID")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with the keys named above.")
metric_option = click.option("--metric", metavar="NAME", help='The metric to sort by; "a/b" for a nested one.')
order_option = click.option("--order", type=click.Choice(["min", "max"]), help="Whether a low or a high value is better.")


def open_existing_storage(text: str) -> Storage:
    """Open the storage that `text` names.

    Raises:
        ValueError: If it names none.
        FileNotFoundError: If it is a local directory that does not exist.

    """
    storage = open_named_storage(text)
    if "://" not in storage.url and not Path(storage.url).is_dir():
        raise FileNotFoundError(f"there is no directory {storage.url}; give the storage of a training")
    return storage


def open_named_storage(text: str) -> Storage:
    """Open the storage that `text` names, which need not exist yet; only the name of a block imports prefect.

    Raises:
        ValueError: If it names none.
        StorageError: If its block cannot be loaded.

    """
    try:
        if is_block_slug(text):  # the server that has it may be started here, and then needs a minute
            from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_new_servers  # noqa: PLC0415 - prefect

            tie_new_servers()
        spec = parse_storage(text)
    except Exception as exc:
        if not is_block_slug(text) or (isinstance(exc, ValueError) and not isinstance(exc, PAGE_OF_PROXY)):
            raise
        why = str(exc).rstrip(".")
        raise StorageError(f"the block {text} could not be loaded: {why}; is PREFECT_API_URL the server that has it?") from exc
    return open_storage(replace(spec, retry=INTERACTIVE_RETRY_POLICY))


def refuse_checkpoint_as_place(place: str, argument: str) -> None:
    """Raise UsageError if the only name that was given is that of a checkpoint: the latest would be written under its name.

    Raises:
        click.UsageError: If it is.

    """
    if place in ("latest", "best") or is_id(place):
        raise click.UsageError(f"{place} is a checkpoint, and {argument} is missing; a directory of this name is ./{place}")
