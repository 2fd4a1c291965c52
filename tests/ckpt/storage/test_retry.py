import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import StorageError, StorageSpec
from prefect_torch.ckpt.storage import retry
from prefect_torch.ckpt.storage.backends import _has_own_keys
from prefect_torch.ckpt.storage.digest import CHUNK_BYTES
from prefect_torch.ckpt.storage.fsspec_files.backend import FsspecStorage
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.parallel import for_each, read_all
from prefect_torch.ckpt.storage.retry import (
    ClockSkewError,
    CredentialsExpiredError,
    LoginError,
    RetryingStorage,
    RetryPolicy,
    classify,
    ended_by,
    retries_ended_by,
    with_retries,
)

AT_ONCE = RetryPolicy(deadline_s=30, first_wait_s=0, longest_wait_s=0)


class EndOfPause(threading.Event):
    """Is set while somebody waits for it, who waits for nothing else."""

    def wait(self, timeout=None):
        threading.Thread(target=self.set).start()
        return super().wait()


class Flaky(FaultyStorage):
    """Fails its first `times` operations with `error`."""

    def __init__(self, inner, times, error):
        super().__init__(inner, error=error)
        self.times = times

    def _do(self, verb, *args, **kwargs):
        self.crash_at = len(self.operations) + 1 if self.fired < self.times else None
        return super()._do(verb, *args, **kwargs)


@pytest.fixture
def memory(tmp_path):
    return FsspecStorage(f"memory://{tmp_path}", {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StorageError("503 SlowDown"), "transient"),
        (ConnectionResetError(), "transient"),
        (TimeoutError(), "transient"),
        (OSError(errno.ESTALE, "Stale file handle"), "transient"),
        (CredentialsExpiredError("x"), "credentials"),
        (StorageError("ExpiredToken: the provided token has expired"), "credentials"),
        (StorageError("Token has expired and refresh failed"), "credentials"),
        (FileNotFoundError("run/ExpiredToken.txt does not exist"), "final"),
        (PermissionError("403"), "final"),
        (FileNotFoundError(), "final"),
        (OSError(errno.ENOSPC, "No space left on device"), "final"),
        (ValueError("bad key"), "final"),
        (ValueError("run/ExpiredToken/../x is no key"), "final"),
        (FileNotFoundError("'ExpiredToken' does not exist"), "final"),
        (ValueError("'ExpiredToken' is no key"), "final"),
    ],
)
def test_errors_have_a_class(error, kind):
    assert classify(error) == kind


@pytest.mark.parametrize("error", [StorageError("503"), ConnectionResetError(), TimeoutError()])
def test_what_passes_is_tried_again(memory, error):
    flaky = Flaky(memory, 3, error)
    RetryingStorage(lambda: flaky, AT_ONCE).put_bytes("x", b"1")
    assert flaky.fired == 3
    assert memory.get_bytes("x") == b"1"


@pytest.mark.parametrize("error", [PermissionError("refused"), FileNotFoundError("x"), OSError(errno.ENOSPC, "full")])
def test_what_cannot_pass_is_raised_as_it_is_at_once(memory, error):
    flaky = Flaky(memory, 9, error)
    with pytest.raises(type(error)) as caught:
        RetryingStorage(lambda: flaky, AT_ONCE).put_bytes("x", b"1")
    assert caught.value is error
    assert flaky.fired == 1


PASSING = ["EAGAIN", "EBUSY", "ECOMM", "EINTR", "EIO", "ENETDOWN", "ENOLCK", "ENOTCONN", "EREMOTEIO", "ESTALE", "ETIMEDOUT"]
LASTING = ["EACCES", "EDQUOT", "EFBIG", "ENOSPC", "EROFS"]


class FailingCalls:
    """Makes a function of os fail its first `times` calls with an error number."""

    def __init__(self, monkeypatch, name, code, times):
        self.fired = 0
        real = getattr(os, name)

        def fail(*args, **kwargs):
            if self.fired == times:
                return real(*args, **kwargs)
            self.fired += 1
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

        monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("code", PASSING)
def test_what_passes_on_a_folder_is_tried_again_without_a_trace(tmp_path, monkeypatch, code):
    storage = open_storage(StorageSpec(str(tmp_path / "store"), retry=AT_ONCE))
    failing = FailingCalls(monkeypatch, "fsync", code, 2)
    storage.put_bytes("run/x", b"1")
    assert failing.fired == 2
    assert storage.get_bytes("run/x") == b"1"
    assert [path.name for path in (tmp_path / "store").rglob("*")] == ["run", "x"]


@pytest.mark.parametrize("name", ["open", "stat", "scandir", "unlink"])
def test_every_way_to_use_a_folder_is_tried_again(tmp_path, monkeypatch, name):
    storage = open_storage(StorageSpec(str(tmp_path), retry=AT_ONCE))
    storage.put_bytes("run/x", b"1")
    with monkeypatch.context() as patch:
        failing = FailingCalls(patch, name, "ESTALE", 2)
        calls = {"open": storage.get_bytes, "stat": storage.size, "unlink": lambda key: storage.delete([key])}
        calls.get(name, lambda key: list(storage.list("run/")))("run/x")
    assert failing.fired == 2


def test_a_rename_whose_answer_was_lost_stores_the_object_again(tmp_path, monkeypatch):
    """An NFS server that restarted does not know that it has answered, and finds no file to rename."""
    storage = open_storage(StorageSpec(str(tmp_path / "store"), retry=AT_ONCE))
    replace, lost = os.replace, []

    def lose_an_answer(source, target, **folders):
        replace(source, target, **folders)
        if not lost:
            lost.append(target)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

    monkeypatch.setattr(os, "replace", lose_an_answer)
    storage.put_bytes("run/x", b"1")
    assert lost == ["x"]
    assert storage.get_bytes("run/x") == b"1"
    assert [path.name for path in (tmp_path / "store").rglob("*")] == ["run", "x"]


def test_a_folder_that_stays_stale_is_a_storage_error_after_the_deadline(tmp_path, monkeypatch):
    storage = open_storage(StorageSpec(str(tmp_path), retry=RetryPolicy(0.05, 0, 0)))
    failing = FailingCalls(monkeypatch, "fsync", "ESTALE", 10**6)
    with pytest.raises(StorageError, match=r"storing .*/run/x failed \d+ times in \d+ s; the last error: .*Stale file handle"):
        storage.put_bytes("run/x", b"1")
    assert failing.fired > 1


@pytest.mark.parametrize("code", LASTING)
def test_what_lasts_on_a_folder_is_raised_at_once(tmp_path, monkeypatch, code):
    storage = open_storage(StorageSpec(str(tmp_path), retry=AT_ONCE))
    failing = FailingCalls(monkeypatch, "fsync", code, 9)
    with pytest.raises(OSError, match=os.strerror(getattr(errno, code))):
        storage.put_bytes("run/x", b"1")
    assert failing.fired == 1


@pytest.mark.parametrize("read", [read_all, for_each])
def test_retries_of_a_context_end_with_its_event_in_the_threads_that_read_for_it(memory, read):
    storage = RetryingStorage(lambda: Flaky(memory, 10**6, ConnectionResetError("reset by peer")), RetryPolicy(0, 0, 0))
    end = threading.Event()
    end.set()
    with retries_ended_by(end), pytest.raises(StorageError, match="failed 1 times"):
        read(["x", *"abcdefghijk"], lambda key: key == "x" and storage.put_bytes(key, b"1"))


@pytest.mark.parametrize("read", [read_all, for_each])
def test_operations_of_a_context_end_with_its_check_in_the_threads_that_read_for_it(memory, read):
    flaky = Flaky(memory, 0, ConnectionResetError())
    storage = RetryingStorage(lambda: flaky, AT_ONCE)
    with ended_by(lambda: int("over")), pytest.raises(ValueError, match="over"):
        read(["x", "y"], lambda key: storage.put_bytes(key, b"1"))
    assert list(storage.list("")) == []


@pytest.mark.parametrize("verb", ["digest", "get_file"])
def test_the_transfer_of_a_large_file_ends_with_the_check_of_its_context(tmp_path, verb):
    storage, asked = open_storage(tmp_path / "store"), []
    storage.put_bytes("large", bytes(4 * CHUNK_BYTES))

    def check():
        asked.append(None)
        if len(asked) == 3:
            raise InterruptedError("over")

    with ended_by(check), pytest.raises(InterruptedError, match="over"):
        getattr(storage, verb)("large", *([tmp_path / "copy"] if verb == "get_file" else []))
    assert len(asked) == 3


def test_after_the_deadline_it_says_what_was_tried(memory):
    flaky = Flaky(memory, 10**6, ConnectionResetError("reset by peer"))
    storage = RetryingStorage(lambda: flaky, RetryPolicy(0.05, 0, 0))
    with pytest.raises(StorageError, match=r"storing memory://.*/x failed \d+ times in \d+ s; the last error: reset by peer"):
        storage.put_bytes("x", b"1")
    assert flaky.fired > 1


def test_retries_of_a_context_end_with_its_event_in_the_middle_of_a_pause(memory):
    flaky = Flaky(memory, 10**6, ConnectionResetError("reset by peer"))
    storage = RetryingStorage(lambda: flaky, RetryPolicy(deadline_s=600, first_wait_s=600, longest_wait_s=600))
    with retries_ended_by(EndOfPause()):
        for num_tries in (2, 3):  # once ended, there is one try and no more
            with pytest.raises(StorageError, match="reset by peer"):
                storage.put_bytes("x", b"1")
            assert flaky.fired == num_tries
    patient = RetryingStorage(lambda: Flaky(memory, 3, ConnectionResetError()), AT_ONCE)
    patient.put_bytes("x", b"1")


def test_expired_credentials_open_the_storage_anew(memory):
    opened = []

    def reopen():
        opened.append(Flaky(memory, 1 if not opened else 0, CredentialsExpiredError("expired")))
        return opened[-1]

    RetryingStorage(reopen, AT_ONCE).put_bytes("x", b"1")
    assert len(opened) == 2
    assert memory.get_bytes("x") == b"1"


def test_credentials_that_stay_expired_are_not_asked_for_for_ever(memory):
    opened = []

    def reopen():
        opened.append(1)
        return Flaky(memory, 10**6, CredentialsExpiredError("expired"))

    with pytest.raises(CredentialsExpiredError):
        RetryingStorage(reopen, AT_ONCE).put_bytes("x", b"1")
    assert len(opened) == 2


@pytest.mark.parametrize("times", [2, 9])
def test_credentials_with_a_source_are_read_again_until_somebody_renews_them(memory, times):
    opened = []

    def reopen():
        opened.append(Flaky(memory, 1 if len(opened) < times else 0, CredentialsExpiredError("ExpiredToken")))
        return opened[-1]

    RetryingStorage(reopen, AT_ONCE, renews=True).put_bytes("x", b"1")
    assert len(opened) == times + 1


def test_keys_that_a_server_never_knew_are_told_at_once_and_others_after_the_deadline(memory):
    unknown = CredentialsExpiredError("unknown there: InvalidAccessKeyId")
    flaky = Flaky(memory, 10**6, unknown)
    storage = RetryingStorage(lambda: flaky, RetryPolicy(0.05, 0, 0), renews=True)
    with pytest.raises(CredentialsExpiredError):
        storage.put_bytes("x", b"1")
    assert flaky.fired == 2
    flaky.times = flaky.fired
    storage.put_bytes("x", b"1")
    flaky.times = 10**6
    with pytest.raises(StorageError, match=r"failed \d+ times in \d+ s; the last error: unknown there"):
        storage.put_bytes("x", b"1")


def test_a_clock_that_has_been_right_is_waited_for_and_one_that_never_was_is_told_at_once(memory):
    """A virtual machine that was suspended goes on with its old time, until NTP sets it some seconds later."""
    flaky = Flaky(memory, 1, ClockSkewError("this machine's clock differs"))
    storage = RetryingStorage(lambda: flaky, AT_ONCE)
    with pytest.raises(ClockSkewError):
        storage.put_bytes("x", b"1")
    storage.put_bytes("x", b"1")
    flaky.times = 4
    storage.put_bytes("x", b"2")
    assert (flaky.fired, memory.get_bytes("x")) == (4, b"2")


def test_a_clock_that_stays_wrong_is_a_storage_error_after_the_deadline(memory):
    flaky = Flaky(memory, 0, ClockSkewError("this machine's clock differs"))
    storage = RetryingStorage(lambda: flaky, RetryPolicy(0.05, 0, 0))
    storage.put_bytes("x", b"1")
    flaky.times = 10**6
    with pytest.raises(StorageError, match=r"failed \d+ times in \d+ s; the last error: this machine's clock differs"):
        storage.put_bytes("x", b"1")
    assert flaky.fired > 1


@pytest.mark.parametrize(
    ("url", "options", "variable", "renews"),
    [
        ("s3://bucket", {}, None, True),
        ("s3://bucket", {"aws_web_identity_token_file": "/token"}, None, True),
        ("s3://bucket", {"aws_access_key_id": "x", "aws_secret_access_key": "y"}, None, False),
        ("az://container", {"sas_key": "x"}, None, False),
        ("s3a://bucket", {}, "AWS_ACCESS_KEY_ID", False),
        ("abfss://container", {}, "AZURE_STORAGE_SAS_TOKEN", False),
        ("az://container", {}, "AWS_ACCESS_KEY_ID", True),  # which are for something else
        ("gs://bucket", {}, "AWS_ACCESS_KEY_ID", True),
        ("s3://bucket", {}, "AZURE_STORAGE_ACCOUNT_KEY", True),
    ],
)
def test_a_login_in_options_or_variables_is_renewed_by_nobody(monkeypatch, url, options, variable, renews):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "x")
    assert _has_own_keys(StorageSpec(url, options)) != renews


def test_a_response_lost_after_success_is_harmless(memory, tmp_path):
    (tmp_path / "in").write_bytes(b"data")
    lossy = FaultyStorage(memory, 1, after=True, error=ConnectionResetError())
    moved = RetryingStorage(lambda: lossy, AT_ONCE).put_file("x", tmp_path / "in")
    assert lossy.fired == 1
    assert (moved.bytes, memory.get_bytes("x")) == (4, b"data")


class BrokenListings(FaultyStorage):
    """Breaks off the listings after as many objects as `lengths` says, one listing each."""

    def __init__(self, inner, lengths):
        super().__init__(inner)
        self.lengths = list(lengths)
        self.begun_after = []

    def list(self, prefix, *, after=None, splits=None):
        self.begun_after.append(after)
        left = self.lengths.pop(0) if self.lengths else None
        for number, info in enumerate(self.inner.list(prefix, after=after)):
            if number == left:
                self.fired += 1
                raise TimeoutError
            yield info


def test_a_listing_that_breaks_off_is_begun_anew_and_tells_each_object_once(memory):
    keys = [f"k/{number:05d}" for number in range(2500)]
    for key in keys:
        memory.put_bytes(key, b"")
    broken = BrokenListings(memory, [1700, 0])
    assert [info.key for info in RetryingStorage(lambda: broken, AT_ONCE).list("k/")] == keys
    assert broken.fired == 2
    assert broken.begun_after == [None, None, None]


def test_a_listing_that_goes_well_is_begun_once_however_long(memory):
    for number in range(2500):
        memory.put_bytes(f"k/{number:05d}", b"")
    whole = BrokenListings(memory, [])
    assert len(list(RetryingStorage(lambda: whole, AT_ONCE).list("k/", after="k/00099"))) == 2400
    assert whole.begun_after == ["k/00099"]


def test_a_deadline_of_nothing_leaves_one_more_try(memory):
    flaky = Flaky(memory, 1, ConnectionResetError())
    RetryingStorage(lambda: flaky, RetryPolicy(deadline_s=0, first_wait_s=0, longest_wait_s=0)).put_bytes("x", b"1")
    assert flaky.fired == 1


def test_a_transfer_that_failed_after_minutes_is_retried_as_long_as_one_that_failed_at_once(memory, monkeypatch):
    """A rank's share of a large state takes minutes: a burst of 503 in the third one failed the report after two tries."""
    ahead_s = 0.0

    class Slow(Flaky):
        def put_bytes(self, key, data):
            nonlocal ahead_s
            ahead_s = 200.0
            super().put_bytes(key, data)

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    flaky = Slow(memory, 3, ConnectionResetError())
    RetryingStorage(lambda: flaky, RetryPolicy(deadline_s=120, first_wait_s=0, longest_wait_s=0)).put_bytes("x", b"1")
    assert flaky.fired == 3


def test_threads_whose_credentials_expired_together_share_a_failed_reading_of_new_ones(memory):
    """Each may take a minute, while Prefect's API is away: 32 threads took half an hour, one after the other."""
    num_threads, read, arrived, all_wait = 4, [], [], threading.Event()
    together = threading.Barrier(num_threads)

    class Expired(FaultyStorage):
        def get_bytes(self, key):
            together.wait(60)
            raise CredentialsExpiredError("expired")

    class Lock:
        def __init__(self):
            self.lock = threading.Lock()

        def __enter__(self):
            arrived.append(None)
            if len(arrived) == num_threads:
                all_wait.set()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    def reopen():
        read.append(None)
        assert all_wait.wait(60)
        raise ConnectionError("503 of Prefect")

    storage = RetryingStorage(reopen, RetryPolicy(deadline_s=0, first_wait_s=0, longest_wait_s=0), Expired(memory))
    storage._one_replaces = Lock()
    with ThreadPoolExecutor(num_threads) as pool:
        calls = [pool.submit(storage.get_bytes, "x") for _ in range(num_threads)]
    for call in calls:
        with pytest.raises(StorageError, match="cannot be read anew: 503 of Prefect"):
            call.result()
    assert len(read) == 1


def test_threads_whose_credentials_expired_together_open_the_storage_anew_once(memory):
    all_failed = threading.Barrier(4)
    opened = []

    class Expired(FaultyStorage):
        def put_bytes(self, key, data):
            all_failed.wait(30)
            raise CredentialsExpiredError("expired")

    def reopen():
        opened.append(memory if opened else Expired(memory))
        return opened[-1]

    storage = RetryingStorage(reopen, AT_ONCE)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: storage.put_bytes(key, b"1"), "abcd"))
    assert len(opened) == 2


@pytest.mark.parametrize(
    "look",
    [
        lambda storage: storage.reopened().put_bytes("y", b"1"),
        lambda storage: with_retries(storage, "looking for", "x", lambda inner: inner.reopened().put_bytes("y", b"1")),
    ],
    ids=["reopened", "with_retries"],
)
def test_a_login_that_fails_for_a_moment_is_tried_again_for_a_second_look(memory, look):
    """A new connection looks for a login, as by a profile's process, which has worked before."""
    fails = [LoginError("the vault is away")] * 2

    class Reopening(FsspecStorage):
        def reopened(self):
            if fails:
                raise fails.pop()
            return memory

    look(RetryingStorage(lambda: Reopening(memory.url, {}), AT_ONCE))
    assert fails == []
    assert memory.get_bytes("y") == b"1"


def test_every_verb_passes_through(memory, tmp_path):
    storage = RetryingStorage(lambda: memory, AT_ONCE)
    (tmp_path / "in").write_bytes(b"12")
    storage.put_file("a", tmp_path / "in")
    storage.get_file("a", tmp_path / "out")
    assert (storage.size("a"), storage.get_bytes("a"), storage.local_path("a"), storage.url) == (2, b"12", None, memory.url)
    storage.remove_interrupted("a", 0)
    assert storage.size("a") == 2
    storage.delete(["a"])
    assert list(storage.list("")) == []


def test_pauses_are_drawn_from_no_generator_of_the_training(memory):
    before = random.getstate()
    policy = RetryPolicy(deadline_s=30, first_wait_s=0.001, longest_wait_s=0.002)
    flaky = Flaky(memory, 5, TimeoutError())
    RetryingStorage(lambda: flaky, policy).put_bytes("x", b"1")
    assert flaky.fired == 5
    assert random.getstate() == before


def test_pauses_double_and_end_at_the_longest():
    policy = RetryPolicy(first_wait_s=0.2, longest_wait_s=10.0)
    for num_tries, longest_s in [(1, 0.2), (2, 0.4), (5, 3.2), (7, 10.0), (10_000, 10.0)]:
        drawn = [retry._draw_wait_s(policy, num_tries) for _ in range(200)]
        assert 0 <= min(drawn) <= max(drawn) <= longest_s
        assert max(drawn) > longest_s / 2
