"""The program of a rank's process: joins the process group, runs the user's function and returns its result.

Its last argument is the number of the pipe for the RankResult; it reads a pickled RankSpec from stdin. It imports torch, never
prefect.
"""

import faulthandler
import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt import CheckpointStore, TrainContext
from prefect_torch.ckpt.reporting.api import start_session
from prefect_torch.ckpt.reporting.session import EvaluationSession, RankSession
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.metrics import Metrics, clean_metrics
from prefect_torch.ckpt.storage.synced.first_download import download_missing
from prefect_torch.ckpt.text import clip, encodable
from prefect_torch.tasks.rank.resources.available_memory import available_bytes
from prefect_torch.tasks.rank.resources.cpus import default_threads
from prefect_torch.tasks.rank.resources.device import is_memory_held_by_others, take_device
from prefect_torch.tasks.rank.resources.oom_kills import OomKills
from prefect_torch.tasks.rank.starting.guard import STACK_TRACES_SIGNAL, outlast_sigterm

from .checkpoint_ref import CheckpointRef
from .cpu_pickle import dump_on_cpu
from .errors import RankFailureKind, StorageNotSeenError
from .failures import of_exception
from .function import PackedFunction, TrainFunction, takes_config, unpack_function
from .group_store import GroupStore
from .machine_paths import enter_paths
from .node_store import open_node
from .orderly_end import end_in_order
from .plain_result import encode_result
from .rendezvous import CUT_SHORT_KEY, TERMINATION_KEY, TcpKeyValue, connect
from .spec import RankResult, RankSpec
from .tracebacks import message_line, user_traceback
from .working_dir import unpacked, within

if TYPE_CHECKING:
    import torch

_MOST_TEXT = 100_000  # characters of a traceback


def main() -> None:
    """Run one rank and leave a RankResult in the pipe."""
    faulthandler.enable()
    faulthandler.register(STACK_TRACES_SIGNAL, all_threads=True)
    outlast_sigterm()
    result_fd = int(sys.argv[-1])
    os.set_inheritable(result_fd, False)
    spec: RankSpec = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    sys.argv = [spec.function.name]
    with ExitStack() as held:
        result = _run(spec, held)
        _flush_output()
        with os.fdopen(result_fd, "wb") as pipe:
            pipe.write(pickle.dumps(result) if spec.master_host is None else encode_result(result))
        if result.kind is None:
            end_in_order(held.close)
            _flush_output()
    # Not sys.exit: after a failure, a collective or a thread of the user may hang; what is native may do so at any end.
    os._exit(0 if result.kind is None else 1)


class _FinalError(Exception):
    """An error before the function runs that another attempt would meet again."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def _final(*kinds: type[BaseException]) -> Iterator[None]:
    """Raise errors of these kinds in the body as a _FinalError."""
    try:
        yield
    except kinds as exc:
        raise _FinalError(exc) from exc


def _run(spec: RankSpec, held: ExitStack) -> RankResult:
    _prepare(spec)
    try:
        packed = _enter_paths(spec, held)
        # Before the function's module is imported, which may make a tensor on "cuda": that is the current device.
        device = take_device(spec.local_rank) if spec.use_gpu else None
        group_store = GroupStore.open(spec)  # before that, too: the module may read MASTER_PORT
        with _final(BaseException):  # the import of a module may raise anything
            function, config = unpack_function(packed)
        key_value = connect(spec.rendezvous, spec.timeout_s)
        with _final(RuntimeError, ValueError):
            store = _open_run(spec)
            backend = _check_backend(spec, device)
        session = _session(spec, store, key_value)
        _join_process_group(spec, backend, device, key_value if group_store is None else group_store.key_value)
        result = _train(function, config, session, spec)
        if result.kind is None:  # a group that lost a rank may wait for it without limit
            _leave_process_group()
            if session.is_cut_short:
                key_value.set(CUT_SHORT_KEY, b"")
            if group_store is not None:
                group_store.close(spec, key_value)
    except _FinalError as exc:
        return _failure(exc.error, "final")
    except Exception as exc:  # noqa: BLE001 - returned as the result
        return _failure(exc, of_exception(exc, in_function=False))
    return result


def _prepare(spec: RankSpec) -> None:
    if logging.lastResort is not None:  # what no handler takes, such as the warnings of this package, says its level, too
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    os.environ.update(spec.environment())
    if spec.rendezvous.host == "127.0.0.1" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo resolves the host's name, perhaps to another address
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # else NCCL takes the first interface that it likes
    for name, value in default_threads(spec.local_world_size).items():
        os.environ.setdefault(name, value)
    if not spec.use_gpu:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else an Accelerator treats each rank as a separate training


def _enter_paths(spec: RankSpec, held: ExitStack) -> PackedFunction:
    """Take the working directory and the search path of the function, and return it as it is there."""
    function, is_elsewhere = spec.function, spec.master_host is not None
    if spec.working_dir is None:
        enter_paths(function, is_elsewhere=is_elsewhere)
        return function
    layout = _open_run(spec).layout
    download_missing(spec.storage, spec.run, [layout.code(spec.working_dir.digest, spec.working_dir.evaluation)])
    copy = held.enter_context(unpacked(spec.working_dir, spec.storage, spec.run))
    function = within(function, spec.working_dir.root, copy)
    enter_paths(function, is_elsewhere=is_elsewhere)
    sys.path[:] = [str(copy), *(path for path in sys.path if path != str(copy))]
    return function


def _open_run(spec: RankSpec) -> CheckpointStore:
    """Return the run; the first rank of each machine makes sure that the machine sees it."""
    store = CheckpointStore.open(spec.storage, spec.run)
    _download(spec, store)
    if spec.local_rank == 0 and next(store.storage.list(store.layout.attempts), None) is None:
        machine = spec.node_name or socket.gethostname()
        raise StorageNotSeenError(
            f"rank {spec.rank} on machine {machine} cannot see run {spec.run!r} in {store.storage.url}, which the flow's "
            "process wrote: every rank needs the same storage (a shared directory or a URL; memory:// lives in one process "
            "only)"
        )
    return store


def _download(spec: RankSpec, store: CheckpointStore) -> None:
    """Bring what this rank restores from where another machine has uploaded it; nothing where all machines see one storage."""
    download_missing(spec.storage, spec.run, [store.layout.run_info])
    if (ref := spec.restored) is not None:
        download_missing(ref.storage, ref.run, _keys_of(ref))


def _keys_of(ref: CheckpointRef) -> Iterator[str]:
    """Yield the keys of a checkpoint; its manifest may have 10^5 files, and is decoded only if they are asked for."""
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
    restored = None if spec.restored is None else spec.restored.open()
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

    if dist.is_initialized():  # otherwise the user's function has destroyed it
        dist.destroy_process_group()


def _train(function: TrainFunction, config: dict[str, Any] | None, session: RankSession, spec: RankSpec) -> RankResult:
    start_session(session)
    if session.takes_reports:
        _watch_steps(spec.local_world_size)
    oom_kills = OomKills()
    try:
        try:
            with _this_process_only():
                value = _call(function, config)
                if spec.evaluates and spec.rank == 0:
                    value = _as_metrics(value, spec)
        except SystemExit as exc:
            if exc.code not in (None, 0):
                session.fail(f"sys.exit({exc.code!r})", spec.flush_s)
                return _failure(exc, "user")
            value = None
        session.finish()
    except BaseException as exc:  # noqa: BLE001 - returned to the leader, which raises it again
        _explain_second_group(exc)
        is_gpu_shared = spec.use_gpu and of_exception(exc) == "out_of_memory" and is_memory_held_by_others()
        kind = of_exception(exc, oom_killed=bool(oom_kills.happened()), is_gpu_shared=is_gpu_shared)
        session.fail(_one_line(exc), spec.flush_s)
        return _failure(exc, kind)
    finally:
        start_session(None)
    return RankResult(return_value=_dump_value(value) if spec.rank == 0 else None)


def _watch_steps(num_ranks: int) -> None:
    """Have memory for the first report of a state touched after the first steps, at most this rank's share of what is free."""
    from prefect_torch.ckpt.state.expected_size import watch_steps  # noqa: PLC0415 - torch is imported by now

    watch_steps(lambda: available_bytes() // num_ranks)


def _call(function: TrainFunction, config: dict[str, Any] | None) -> Any:
    if takes_config(function):
        return function({} if config is None else config)
    if config:
        raise TypeError(f"config is given but {function.__name__}() takes no argument")
    return function()


def _explain_second_group(exc: BaseException) -> None:
    """Add the remedy to torch's refusal of a second process group; its traceback stays that of the user's call."""
    if isinstance(exc, ValueError) and "default process group twice" in str(exc):
        exc.args = (f"{exc} The process group is ready when the function is called: leave init_process_group() out",)


def _as_metrics(value: object, spec: RankSpec) -> Metrics:
    if not isinstance(value, Mapping):
        raise TypeError(f"{spec.function.name} returned a {type(value).__name__} on rank 0: return a dict of metrics")
    return clean_metrics(value)


@contextmanager
def _this_process_only() -> Iterator[None]:
    """Exit a process that the body forked when it leaves the body: the session belongs to its parent."""
    pid = os.getpid()
    returncode = 1
    try:
        yield
        returncode = 0
    except SystemExit as exc:
        returncode = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if os.getpid() != pid and not isinstance(exc.code, int | None):
            print(exc.code, file=sys.stderr)  # noqa: T201 - as Python does
        raise
    except Exception:
        if os.getpid() != pid:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != pid:
            _flush_output()
            os._exit(returncode & 0xFF)


def _flush_output() -> None:
    """Flush what the function has printed, if its streams can: it may have closed them, or put anything in their place."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _failure(exc: BaseException, kind: RankFailureKind) -> RankResult:
    text = encodable(clip(user_traceback(exc), _MOST_TEXT))
    try:
        # Prefect cannot store a state whose text holds a lone surrogate, which does not encode, nor one of many megabytes.
        pickled = dump_on_cpu(exc) if len(str(exc).encode()) <= _MOST_TEXT else None
        if pickled is not None:
            pickle.loads(pickled)  # noqa: S301 - many exceptions pickle but do not unpickle
    except Exception:  # noqa: BLE001 - the text is sent in any case
        pickled = None
    return RankResult(kind=kind, error=_one_line(exc), traceback=text, exception=pickled)


def _one_line(exc: BaseException) -> str:
    return encodable(clip(message_line(exc)))


def _dump_value(value: Any) -> bytes | None:
    try:
        return dump_on_cpu(value)
    except Exception as exc:  # noqa: BLE001 - a finished training must not fail for its return value
        with suppress(Exception):  # as for `_flush_output`
            print(f"the return value is dropped, since it cannot be pickled: {exc}", file=sys.stderr)  # noqa: T201 - the rank's log
        return None


if __name__ == "__main__":
    main()
