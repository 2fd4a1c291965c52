"""The program of a rank's process: joins the process group, runs the user's function and returns its result.

Its last argument is the number of the pipe for the RankResult; it reads a pickled RankSpec from stdin. It imports torch, never
prefect.
"""

import codecs
import faulthandler
import io
import logging
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt import CheckpointStore, StorageError, TrainContext
from prefect_torch.ckpt.reporting.session import EvaluationSession, RankSession
from prefect_torch.ckpt.runs.attempts.attempt import claim_keys
from prefect_torch.ckpt.runs.layout import Layout, attempt_number
from prefect_torch.ckpt.storage.retry import LoginError
from prefect_torch.ckpt.storage.synced.first_download import download_missing, download_unless
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.errors import StorageNotSeenError
from prefect_torch.tasks.rank.failures import of_exception, of_start
from prefect_torch.tasks.rank.plain_result import encode_result
from prefect_torch.tasks.rank.program.call import call_in_session, failure_of, flush_output
from prefect_torch.tasks.rank.program.group_store import GroupStore, machines_named
from prefect_torch.tasks.rank.program.node_store import open_node
from prefect_torch.tasks.rank.program.orderly_end import end_in_order
from prefect_torch.tasks.rank.rendezvous import CUT_SHORT_KEY, TERMINATION_KEY, TcpKeyValue, connect, joining
from prefect_torch.tasks.rank.resources.cpus import default_threads
from prefect_torch.tasks.rank.resources.device import take_device, wait_for_kernels
from prefect_torch.tasks.rank.resources.interfaces import interface_variables
from prefect_torch.tasks.rank.spec import RankResult, RankSpec
from prefect_torch.tasks.rank.starting.guard import STACK_TRACES_SIGNAL, outlast_sigterm
from prefect_torch.tasks.rank.user_code.function import PackedFunction, unpack_function
from prefect_torch.tasks.rank.user_code.function_reference import TrainFunction
from prefect_torch.tasks.rank.user_code.working_dir import enter_paths, unpacked, within

if TYPE_CHECKING:
    import torch
    from tenacity import RetryCallState

_LOGIN_S = 20.0


def main() -> None:
    """Run one rank and leave a RankResult in the pipe."""
    faulthandler.enable()
    faulthandler.register(STACK_TRACES_SIGNAL, all_threads=True)
    outlast_sigterm()
    result_fd = int(sys.argv[-1])
    os.set_inheritable(result_fd, False)
    spec: RankSpec = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    sys.argv = [spec.function.name]
    _write_utf8()
    with ExitStack() as held:
        group = ExitStack()
        result = _run(spec, held, group)
        flush_output()
        with os.fdopen(result_fd, "wb") as pipe:
            pipe.write(pickle.dumps(result) if spec.master_host is None else encode_result(result))
        if result.kind is None:  # else: a group that lost a rank may wait for it without limit
            if spec.use_gpu:
                wait_for_kernels(spec.local_rank)  # of collectives that other ranks take part in, which end with this process
            end_in_order(_leave_process_group, held.close)
            group.close()
            flush_output()
    # Not sys.exit: after a failure, a collective or a thread of the user may hang; native code may do so at any exit.
    os._exit(0 if result.kind is None else 1)


def _write_utf8() -> None:
    """Let any text be printed, whatever the locale of this machine: the other end of the pipe reads UTF-8.

    With a new stream: that of a fork server was made for another file, and would ask for its position.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            raw = open(stream.fileno(), "wb", 0, closefd=False)  # noqa: SIM115 - a descriptor, which stays open
            setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))


class _FinalError(Exception):
    """An error before the function runs that another attempt on this machine would meet again."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def _final(*kinds: type[BaseException]) -> Iterator[None]:
    """Raise errors of these kinds in the body as a _FinalError."""
    try:
        yield
    except kinds as exc:
        raise _FinalError(exc) from exc


def _run(spec: RankSpec, held: ExitStack, group: ExitStack) -> RankResult:
    """Return the result of the function; `group` then waits for the ranks that need this one's store, once it has left."""
    _prepare(spec)
    try:
        # First: other machines may have nothing to download, and the function's module may read MASTER_PORT.
        group_store = GroupStore.open(spec)
        packed, store = _enter_paths(spec, held)
        # Before that module is imported, which may make a tensor on "cuda": that is the current device.
        device = take_device(spec.local_rank) if spec.use_gpu else None
        with _final(BaseException):  # the import of a module may raise anything
            function, config = _unpack(spec, packed)
        key_value = connect(spec.rendezvous, spec.timeout_s)
        with _final(RuntimeError, ValueError):
            store = store or _open_run(spec)
            backend = _check_backend(spec, device)
        session = _session(spec, store, key_value)
        with joining(key_value), machines_named(spec):
            _join_process_group(spec, backend, device, key_value if group_store is None else group_store.key_value)
        if group_store is not None:
            group.callback(group_store.close, spec, key_value)
        result = call_in_session(function, config, session, spec)
        if result.kind is None and session.is_cut_short:
            key_value.set(CUT_SHORT_KEY, b"")
    except _FinalError as exc:
        num_machines = 0 if spec.master_host is None else spec.num_nodes
        return failure_of(exc.error, of_start(exc.error, resumes=spec.resumes, num_machines=num_machines))
    except Exception as exc:  # noqa: BLE001 - returned as the result
        return failure_of(exc, of_exception(exc, in_function=False))
    return result


def _prepare(spec: RankSpec) -> None:
    if logging.lastResort is not None:  # records without a handler, such as the warnings of this package, show their level, too
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    os.environ.update(spec.environment())
    usual = default_threads(max(spec.local_world_size, spec.ranks_at_once))
    if spec.rendezvous.host == "127.0.0.1" and sys.platform == "linux":
        # Else gloo resolves the host's name, perhaps to another address, and NCCL takes the first interface that it finds.
        usual |= interface_variables("lo")
    for name, value in usual.items():
        os.environ.setdefault(name, value)
    if not spec.use_gpu:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else an Accelerator treats each rank as a separate training


def _enter_paths(spec: RankSpec, held: ExitStack) -> tuple[PackedFunction, CheckpointStore | None]:
    """Enter the working directory and the search path of the function, and return the function with its paths there.

    Returns the run, too, if it had to be opened for a copy of the directory.
    """
    function, is_elsewhere = spec.function, spec.master_host is not None
    if spec.working_dir is None:
        enter_paths(function, is_elsewhere=is_elsewhere)
        return function, None
    with _final(RuntimeError, ValueError):
        run = _open_run(spec)
    key = spec.working_dir.key_for(run)
    folder = "" if spec.working_dir.run is None else f"{key.rpartition('/')[0]}/"  # of a sweep, a trial needs nothing else
    download_missing(spec.storage, spec.working_dir.run or spec.run, [key], folder)
    copy = held.enter_context(unpacked(spec.working_dir, run))
    function = within(function, spec.working_dir.root, copy)
    enter_paths(function, is_elsewhere=is_elsewhere)
    sys.path[:] = [str(copy), *(path for path in sys.path if path != str(copy))]
    return function, run


def _unpack(spec: RankSpec, packed: PackedFunction) -> tuple[TrainFunction, dict[str, Any] | None]:
    """Import the user's code; where one of several machines lacks some, the error says how to bring it there."""
    try:
        return unpack_function(packed)
    except (ImportError, FileNotFoundError) as exc:
        if spec.master_host is not None and sys.version_info >= (3, 11):  # before, a traceback shows no notes
            exc.add_note(
                f"this is machine {_machine(spec)}: each needs the packages of the training installed; "
                "`working_dir` of RunConfig and of evaluate brings your own code to it"
            )
        raise


def _machine(spec: RankSpec) -> str:
    return spec.node_name or socket.gethostname()


def _open_run(spec: RankSpec) -> CheckpointStore:
    """Return the run; the first rank of each machine makes sure that the machine sees it."""
    store = _open_store(spec)
    _download(spec, store)
    if spec.local_rank == 0 and next(store.storage.list(store.layout.attempts), None) is None:
        raise StorageNotSeenError(
            f"rank {spec.rank} on machine {_machine(spec)} cannot see run {spec.run!r} in {store.storage.url}, which the "
            "flow's process wrote: every rank needs the same storage (a shared directory or a URL; memory:// lives in one "
            "process only)"
        )
    store.storage.local_path(store.layout.run_info)  # has seen the run by now, so that it makes none below an empty mount point
    return store


def _open_store(spec: RankSpec) -> CheckpointStore:
    """Open the run with a login that the flow's process has used: one whose source fails, as a busy STS, is tried for a while.

    Raises:
        StorageError: If it has not become usable in that time, as on a machine that lacks the program of its profile.

    """
    try:
        return CheckpointStore.open(spec.storage, spec.run)
    except LoginError:
        from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed  # noqa: PLC0415 - rarely needed

        def give_up(state: "RetryCallState") -> CheckpointStore:
            assert state.outcome is not None
            raise StorageError(str(state.outcome.exception())) from state.outcome.exception()

        return Retrying(
            retry=retry_if_exception_type(LoginError),
            stop=stop_after_delay(_LOGIN_S),
            wait=wait_fixed(0.5 + spec.rank % 8 / 8),  # the ranks of a machine not all at once
            retry_error_callback=give_up,
        )(CheckpointStore.open, spec.storage, spec.run)


def _download(spec: RankSpec, store: CheckpointStore) -> None:
    """Download what this rank needs and another machine has uploaded; no effect if all machines see one storage.

    That is the checkpoint that it restores, and the claim of the attempt, without which rank 0 can commit nothing.
    """
    download_missing(spec.storage, spec.run, [store.layout.run_info])
    download_unless(lambda: _is_claimed(store, spec), spec.storage, spec.run, store.layout.attempts)
    if (ref := spec.restored) is not None:
        download_missing(ref.storage, ref.run, _keys_of(ref))


def _is_claimed(store: CheckpointStore, spec: RankSpec) -> bool:
    claims = claim_keys(store)
    if spec.reports.claim is not None:
        return spec.reports.claim in claims
    return any(attempt_number(key) >= spec.attempt for key in claims)


def _keys_of(ref: CheckpointRef) -> Iterator[str]:
    """Yield the keys of a checkpoint; its manifest may have 10^5 files, and is decoded only if they are requested."""
    layout = Layout(ref.run)
    yield layout.manifest(ref.checkpoint_id)
    if ref.manifest is not None:
        yield from (layout.data(ref.checkpoint_id, it.path) for it in ref.open().manifest.files)


def _session(spec: RankSpec, store: CheckpointStore, key_value: TcpKeyValue) -> RankSession:
    context = TrainContext(
        world_rank=spec.rank,
        local_rank=spec.local_rank,
        node_rank=spec.node_rank,
        world_size=spec.world_size,
        local_world_size=spec.local_world_size,
        run_name=spec.run,
        attempt=spec.attempt,
    )
    restored = None if spec.restored is None else spec.restored.open(store)
    if restored is not None:
        restored.verify_level = spec.verify
    session = EvaluationSession if spec.evaluates else RankSession
    is_terminating = partial(key_value.check, TERMINATION_KEY)
    return session(context, store, key_value, restored, spec.reports, is_terminating, open_node(spec, key_value))


def _check_backend(spec: RankSpec, device: "torch.device | None") -> str:
    import torch.distributed as dist  # noqa: PLC0415 - after the environment is set

    backend = spec.backend or dist.get_default_backend_for_device("cpu" if device is None else device)
    for name in (part.rpartition(":")[2] for part in backend.split(",")):  # "gloo", or "cpu:gloo,cuda:nccl"
        if not dist.is_backend_available(name):
            raise ValueError(f"backend={spec.backend!r}: torch here has no backend {name!r}; leave it empty for the usual one")
    return backend


def _join_process_group(spec: RankSpec, backend: str, device: "torch.device | None", key_value: TcpKeyValue) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - after the environment is set

    dist.init_process_group(
        backend,
        store=key_value.store,
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=None if spec.timeout_s is None else timedelta(seconds=spec.timeout_s),
        device_id=device,
    )
    import prefect_torch.ckpt.state.save  # noqa: F401, PLC0415 - torch is imported by now; else the first report would import this


def _leave_process_group() -> None:
    import torch.distributed as dist  # noqa: PLC0415 - after the environment is set

    try:
        if dist.is_initialized():  # otherwise the user's function has destroyed it
            dist.destroy_process_group()
    except Exception as exc:  # noqa: BLE001 - such as of NCCL, when another rank has exited; the function has returned
        print(f"WARNING: the process group could not be left: {exc}", file=sys.stderr)  # noqa: T201 - the rank's log


if __name__ == "__main__":
    main()
