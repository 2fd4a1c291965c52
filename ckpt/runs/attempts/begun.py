"""Whether a run has begun: an empty listing is believed only after a request for the run's first object."""

from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.retry import with_retries


def has_begun(run: Run) -> bool:
    """Return whether the run exists: an attempt has claimed it, or it has checkpoints; a listing, and more requests if not.

    Raises:
        StorageError: If an empty listing cannot be believed.

    """

    def is_listed(storage: Storage) -> bool:
        return _lists_attempts_or_manifests(run, storage) or (
            lists_anything(run, storage) and _lists_attempts_or_manifests(run, storage)
        )

    return with_retries(run.storage, "listing", run.name, is_listed)


def check_begun(run: Run) -> None:
    """Raise FileNotFoundError unless the run exists.

    Raises:
        FileNotFoundError: If it does not.
        StorageError: If listings cannot be believed.

    """
    if not has_begun(run):
        raise FileNotFoundError(f"there is no run {run.name!r} in {run.storage.url}")


def lists_anything(run: Run, storage: Storage) -> bool:
    """Return whether anything of the run is listed; if so, an earlier listing that left something out must be repeated.

    Costs a listing, and a request for the run's first object if nothing is listed.

    Args:
        run: The run.
        storage: Its storage, as `with_retries` gives it: each request is sent once.

    Raises:
        StorageError: If nothing is listed, although the first object exists: a gateway answers each listing with its own page
            and a success status.

    """
    if next(iter(storage.list(f"{run.name}/")), None) is not None:
        return True
    try:
        storage.size(run.layout.run_info)
    except FileNotFoundError:
        return False
    raise StorageError(
        f"{run.storage.url} lists nothing of run {run.name!r}, but has its {run.layout.run_info}: something before the "
        "storage answers listings in its place"
    )


def _lists_attempts_or_manifests(run: Run, storage: Storage) -> bool:
    return any(next(iter(storage.list(prefix)), None) for prefix in (run.layout.attempts, run.layout.manifests))
