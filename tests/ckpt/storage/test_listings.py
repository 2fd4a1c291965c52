"""Nothing depends on the order of listings, and one that lags behind never deletes, hides or ends in a riddle."""

import threading
from dataclasses import replace

import pytest
from commits import commit
from counting_storage import CountingStorage
from memory_storage import MemoryStorage
from odd_listings import Emptied, FailingListings, OddListings, Server, Shuffled, Stale, info_of
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, FencedError, RetentionPolicy, StorageError
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.runs.attempts.attempt import (
    Outcome,
    claim_key,
    claim_keys,
    list_attempts,
    newest_attempt,
    read_outcomes,
    write_outcome,
)
from prefect_torch.ckpt.runs.attempts.claims import check_fence, claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.deletion.limits import prune_limits
from prefect_torch.ckpt.runs.deletion.marks import marked
from prefect_torch.ckpt.runs.deletion.pruning import delete_checkpoints
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, lost_records, newest_recorded, read_history
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.ckpt.runs.quarantine import quarantine
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage.object_store.backend import ObstoreStorage
from prefect_torch.ckpt.storage.object_store.listing import BucketListing
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import RetryingStorage
from prefect_torch.ckpt.storage.sizes import find_other_size
from prefect_torch.deployments.command_line.runs.run_summaries import summarize_runs
from wrapped_storage import WrappedStorage

BY_ACCURACY = RetentionPolicy(2, "eval/accuracy")
NOW = "2026-11-21T00:00:00+00:00"


def fill(storage):
    """Fill a run with two attempts of five checkpoints, one of them evaluated best of all, and return the checkpoints."""
    store = CheckpointStore.open(storage, "run")
    manifests = []
    for number in (1, 2):
        assert claim_attempt(store, Owner.current(), world_size=1).number == number
        history = HistoryWriter(store, number)
        for step in range(5 * number - 5, 5 * number):
            manifests.append(commit(store, step, attempt=number))
            history.append(MetricRecord(number, step, {"loss": 0.0}, manifests[-1].id, NOW))
            history.flush()
        write_outcome(store, Outcome(number, "failed"))
    for manifest in manifests:
        accuracy = 1.0 if manifest is manifests[3] else manifest.step / 100
        store.attach_metrics(manifest.id, {"accuracy": accuracy})
    store.hint_latest(manifests[6].id)
    return manifests


def test_a_listing_that_shows_an_old_size_is_no_damage():
    """As on an eventually consistent server, after a put that was tried again."""
    inner = MemoryStorage()
    manifest = commit(CheckpointStore.open(inner, "run"), 1)
    key = CheckpointStore.open(inner, "run").layout.data(manifest.id, "m")
    inner.put_bytes(key, b"half of it")
    stale = Stale(inner)
    inner.put_bytes(key, b"x")
    CheckpointStore.open(stale, "run").verify(manifest, "size")


def test_where_all_objects_are_missing_not_all_are_asked_for():
    counting = CountingStorage(MemoryStorage())
    sizes = {f"run/checkpoints/id/{number:03}": 1 for number in range(1000)}
    assert find_other_size(counting, "run/checkpoints/id/", sizes) == ("run/checkpoints/id/000", None)
    assert counting.taken()["size"] == 32


@pytest.mark.parametrize("seed", range(40))
def test_a_run_reads_alike_in_whatever_order_it_is_listed(seed):
    inner = MemoryStorage()
    manifests = fill(inner)
    ids = [it.id for it in manifests]
    store = CheckpointStore.open(Shuffled(inner, seed), "run")
    assert list(store.ids()) == [it.id for it in store.list()] == ids
    assert list(store.ids(after=ids[3])) == ids[4:]
    assert [it.id for it in store.newest_first()] == ids[::-1]
    assert {it.evaluations for it in store.listed()} == {("eval",)}
    assert store.latest().id == choose_checkpoint(store, lineage=1, verify="size").id == ids[-1]
    assert [it.id for it in store.best(2, "eval/accuracy")] == [ids[3], ids[9]]
    assert [it.number for it in list_attempts(store)] == [it.attempt for it in read_outcomes(store)] == [1, 2]
    assert newest_attempt(store).number == 2
    first, second = claim_keys(store)
    check_fence(store, second)
    with pytest.raises(FencedError, match="overtaken by attempt 2"):
        check_fence(store, first)
    assert [record.checkpoint for record in read_history(store)] == ids
    assert newest_recorded(store) == ids[-1]
    assert lost_records(store, store.listed(), attempt=3) == []
    (summary,) = summarize_runs(store.storage)
    assert (summary.attempts, summary.latest_step, summary.checkpoints, summary.bytes) == (2, 9, 10, 10)
    assert claim_attempt(store, Owner.current(), world_size=1).number == 3
    assert set(store.prune(BY_ACCURACY).keep) == {ids[3], ids[9]}
    assert collect_garbage(store) == []
    assert [it.id for it in store.list()] == [ids[3], ids[9]]
    assert len(list(inner.list("run/manifests/"))) == 4


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_told_and_older_ones_are_tried_in_whatever_order_they_are_listed(seed):
    inner = MemoryStorage()
    ids = [it.id for it in fill(inner)]
    store = CheckpointStore.open(Shuffled(inner, seed), "run")
    for checkpoint_id in ids[-3:]:
        inner.delete([store.layout.data(checkpoint_id, "m")])
    told = []
    chosen = choose_checkpoint(store, lineage=1, verify="size", on_quarantine=lambda *it: told.append(it[0]))
    assert (chosen.id, told) == (ids[-4], ids[:-4:-1])


@pytest.mark.parametrize("kind", ["seaweedfs", "s3rver"])
def test_evaluations_count_on_servers_that_list_them_before_their_manifests(kind, request):
    server = request.getfixturevalue(kind)
    store = CheckpointStore.open(ObstoreStorage(f"s3://{server.new_bucket()}/below", server.options()), "run")
    ids = [it.id for it in fill(store.storage)]
    assert [it.metrics["eval"]["accuracy"] for it in store.list()] == [0.0, 0.01, 0.02, 1.0, *(n / 100 for n in range(4, 10))]
    assert store.latest().id == choose_checkpoint(store, lineage=1, verify="size").id == ids[-1]
    assert [it.id for it in store.best(2, "eval/accuracy")] == [ids[3], ids[9]]
    assert list(store.ids(after=ids[6])) == ids[7:]
    assert list(list_runs(store.storage)) == ["run"]
    store.prune(BY_ACCURACY)
    assert [it.id for it in store.list()] == [ids[3], ids[9]]


def test_nothing_is_deleted_while_pins_are_not_listed():
    inner = MemoryStorage()
    store = CheckpointStore.open(inner, "run")
    manifests = [commit(store, step) for step in range(3)]
    store.pin(manifests[0].id)
    gateway = CheckpointStore.open(Emptied(inner, "run/pins/"), "run")
    for delete in (lambda: gateway.prune(RetentionPolicy(1)), lambda: delete_checkpoints(gateway, manifests[:1])):
        with pytest.raises(StorageError, match=r"does not list run/pins/deletion\.[0-9a-f]{16}\.json"):
            delete()
    assert store.list() == manifests
    assert store.pinned() == {manifests[0].id}  # what the two have left is no pin


def test_a_prune_waits_for_the_listing_of_pins():
    inner = MemoryStorage()
    store = CheckpointStore.open(inner, "run")
    manifests = [commit(store, step) for step in range(3)]
    store.pin(manifests[0].id)
    emptied = Emptied(inner, "run/pins/", times=5)
    gateway = CheckpointStore.open(RetryingStorage(lambda: emptied, RetryPolicy(60.0, 0.0, 0.0)), "run")
    assert gateway.prune(RetentionPolicy(1)).drop == (manifests[1],)
    assert emptied.left == 0
    assert [info.key for info in inner.list("run/pins/")] == [it for it in store.keys("run/pins/") if manifests[0].id in it]


def test_a_pin_beside_a_prune_waits_for_the_listing_of_marks():
    inner = MemoryStorage()
    store = CheckpointStore.open(inner, "run")
    manifest = commit(store, 1)
    with marked(store, [manifest.id]) as mark:
        mark.renew()
        assert not mark.pinned()  # from now on, the prune may delete
        emptied = Emptied(inner, "run/deletions/", times=5)
        gateway = CheckpointStore.open(RetryingStorage(lambda: emptied, RetryPolicy(60.0, 0.0, 0.0)), "run")
        with pytest.raises(CheckpointNotFoundError, match="is being pruned at this moment"):
            gateway.pin(manifest.id)
        assert emptied.left == 0
    with pytest.raises(StorageError, match=r"does not list run/deletions/pin\.[0-9a-f]{16}\.json"):
        CheckpointStore.open(Emptied(inner, "run/deletions/"), "run").pin(manifest.id)
    assert store.pinned() == frozenset()
    store.pin(manifest.id)
    assert not store.keys("run/deletions/")


def test_a_prune_by_another_process_is_limited_though_no_claim_is_listed():
    inner = MemoryStorage()
    store = CheckpointStore.open(inner, "run")
    claim_attempt(store, Owner.current(), world_size=1)
    commit(store, 1)
    gateway = CheckpointStore.open(Emptied(inner, "run/attempts/", times=1), "run")
    assert prune_limits(gateway, read_status(gateway)).up_to == ""


def test_what_is_in_quarantine_is_no_garbage_though_no_note_is_listed():
    inner = MemoryStorage()
    store = CheckpointStore.open(inner, "run")
    manifests = [commit(store, step) for step in range(3)]
    quarantine(store, manifests[0].id, "it is damaged")
    assert collect_garbage(CheckpointStore.open(Emptied(inner, "run/quarantine/"), "run")) == []


KEYS = [f"m/{number:05d}{rest}" for number in range(2500) for rest in (".json", "/eval.json")]


def behind(number):
    return KEYS[2 * number :]


def listing_of(server, *, is_documented=False):
    return BucketListing("s3://bucket", server.pages, lambda _: True, is_documented=is_documented)


def listed(listing, after=None, splits=None):
    return sorted({info.key for info in listing.list("m/", after, splits)})


@pytest.mark.parametrize("kind", ["keys", "folders"])
def test_where_the_order_shows_what_is_not_wanted_is_asked_for_once_at_most(kind):
    server = Server(KEYS, kind)
    listing = listing_of(server)
    for requests in (2, 1, 1):
        server.requests = 0
        assert listed(listing, "m/0240") == behind(2400)
        assert server.requests == requests
    assert listed(listing) == KEYS


def test_where_the_service_promises_an_order_nothing_is_asked_for_twice():
    server = Server(KEYS, "keys")
    assert listed(listing_of(server, is_documented=True), "m/0240") == behind(2400)
    assert server.requests == 1


def test_a_listing_of_a_page_is_one_request_in_any_order():
    for kind in ("keys", "folders", "shuffled"):
        server = Server(KEYS[:1000], kind)
        assert listed(listing_of(server), "m/0040") == KEYS[800:1000]
        assert server.requests == 1


@pytest.mark.parametrize("kind", ["shuffled", "shuffled, ignores after"])
@pytest.mark.parametrize("seed", range(40))
def test_a_server_without_an_order_hides_nothing_behind_a_key(kind, seed):
    listing = listing_of(Server(KEYS, kind, seed))
    for _ in range(3):
        assert listed(listing, "m/0240") == behind(2400)
        assert listed(listing) == KEYS


@pytest.mark.parametrize("is_documented", [False, True])
def test_an_order_that_turns_out_to_be_none_is_not_relied_on_any_more(is_documented):
    server = Server(KEYS, "keys")
    listing = listing_of(server, is_documented=is_documented)
    assert listed(listing, "m/0240") == behind(2400)
    server.become("shuffled, ignores after")
    assert listed(listing, "m/0240") == behind(2400)
    server.become("shuffled")
    assert listed(listing, "m/0240") == behind(2400)


SPLITS = ["m/0020", "m/0060", "m/0100", "m/0140", "m/0180", "m/0220", "m/9"]


@pytest.mark.parametrize("kind", ["keys", "folders"])
@pytest.mark.parametrize("after", [None, "m/0030", "m/0240"])
def test_a_long_listing_is_divided_and_each_object_comes_once(kind, after):
    listing = listing_of(Server(KEYS, kind))
    infos = [info.key for info in listing.list("m/", after, lambda: SPLITS)]
    assert sorted(infos) == (KEYS if after is None else behind(int(after[2:]) * 10))
    assert len(infos) == len(set(infos))


def test_the_parts_of_a_listing_are_requested_concurrently():
    server = Server(KEYS, "keys")
    begun: set[str] = set()
    at_once = threading.Barrier(len(SPLITS))  # the last one, behind all keys, and the first, of 200 behind the first page

    def pages(prefix, after):
        if after is not None and after not in begun:  # the last one is empty, which another request confirms
            begun.add(after)
            at_once.wait(20)
        yield from server.pages(prefix, after)

    assert listed(BucketListing("s3://bucket", pages, lambda _: True, is_documented=True), None, lambda: SPLITS) == KEYS
    assert not at_once.broken


def test_a_short_listing_asks_for_no_splits():
    assert listed(listing_of(Server(KEYS[:999], "keys")), splits=lambda: pytest.fail("asked")) == KEYS[:999]


@pytest.mark.parametrize("kind", ["shuffled", "shuffled, ignores after"])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("is_documented", [False, True])
def test_a_server_without_an_order_hides_nothing_from_parts(kind, seed, is_documented):
    listing = listing_of(Server(KEYS, kind, seed), is_documented=is_documented)
    for _ in range(2):
        assert listed(listing, splits=lambda: SPLITS) == KEYS


@pytest.mark.parametrize("kind", ["shuffled", "shuffled, ignores after"])
@pytest.mark.parametrize("seed", range(20))
def test_an_order_that_ends_within_parts_is_not_relied_on(kind, seed):
    """The server changes its order after the first page, when the parts are about to be listed."""
    server = Server(KEYS, "keys", seed)

    def splits():
        server.become(kind)
        return SPLITS

    assert listed(listing_of(server, is_documented=True), None, splits) == KEYS


@pytest.mark.parametrize("first", range(5))
def test_a_server_that_loses_objects_between_two_pages_is_told_when_parts_are_listed(first):
    """It lists by names and goes on by keys, and its first page ends between the evaluation and its manifest or does not."""
    keys = KEYS[2 * first :] + [f"m/{number:05d}/more.json" for number in range(first)]
    by_names = sorted(keys, key=lambda key: key.split("/"))

    def pages(prefix, after):
        while page := [key for key in by_names if after is None or key > after][:1000]:
            after = page[-1]
            yield [info_of(key) for key in page]

    listing = BucketListing("s3://bucket", pages, lambda key: key in by_names, is_documented=False)
    with pytest.raises(OSError, match="loses objects"):
        listed(listing, None, lambda: SPLITS)


@pytest.mark.parametrize("after", [None, KEYS[500], KEYS[-500]])
def test_a_server_that_lists_its_first_page_only_is_told(after):
    """It is one that knows the first version of listings alone, as pys3local is."""
    listing = BucketListing(
        "s3://bucket", lambda *_: iter([[info_of(key) for key in KEYS[:1000]]]), lambda _: True, is_documented=False
    )
    for _ in range(2):
        with pytest.raises(OSError, match="lists 1000 objects below m/, and the same ones when the next are requested"):
            listed(listing, after)


def test_an_error_of_one_part_is_that_of_the_listing():
    server = Server(KEYS, "keys")

    def pages(prefix, after):
        if after == SPLITS[3]:
            raise TimeoutError("no answer")
        yield from server.pages(prefix, after)

    listing = BucketListing("s3://bucket", pages, lambda _: True, is_documented=True)
    with pytest.raises(TimeoutError, match="no answer"):
        listed(listing, None, lambda: SPLITS)


def test_a_listing_that_breaks_off_is_begun_anew_and_tells_all():
    inner = MemoryStorage()
    keys = {f"m/{number}" for number in range(3500)}
    for key in keys:
        inner.put_bytes(key, b"")
    failing = FailingListings(inner, StorageError("503"), whole=2500, times=2)
    storage = RetryingStorage(lambda: failing, RetryPolicy(60.0, 0.001, 0.001))
    assert {info.key for info in storage.list("m/")} == keys
    assert failing.fired == 2


def test_a_listing_that_breaks_off_at_the_same_place_for_ever_ends():
    inner = MemoryStorage()
    for number in range(2500):
        inner.put_bytes(f"m/{number}", b"")
    failing = FailingListings(inner, StorageError("503"), whole=1500, times=-1)
    storage = RetryingStorage(lambda: failing, RetryPolicy(0.0, 0.001, 0.001))
    with pytest.raises(StorageError, match="listing memory/m/ failed 2 times"):
        list(storage.list("m/"))
    assert failing.fired == 2


def test_a_claim_that_is_not_listed_is_no_claim():
    inner = MemoryStorage()
    fill(inner)
    stale = Stale(inner)
    before = set(inner._keys)
    with pytest.raises(StorageError, match=r"memory does not list run/attempts/000003-.*, which was stored just before"):
        claim_attempt(CheckpointStore.open(stale, "run"), Owner.current(), world_size=1)
    assert set(inner._keys) == before
    with pytest.raises(StorageError, match="does not list new/attempts/000001-"):
        claim_attempt(CheckpointStore.open(stale, "new"), Owner.current(), world_size=1)


def test_a_claim_that_listings_leave_out_for_a_while_is_not_gone():
    inner = MemoryStorage()
    run = CheckpointStore.open(inner, "run")
    claim = claim_key(run, claim_attempt(run, Owner.current(), world_size=1))
    emptied = Emptied(inner, "run/attempts/", times=5)
    check_fence(CheckpointStore.open(RetryingStorage(lambda: emptied, RetryPolicy(60.0, 0.0, 0.0)), "run"), claim)
    assert emptied.left == 0
    with pytest.raises(FencedError, match="the claim of attempt 1 on run 'run' is gone"):
        check_fence(CheckpointStore.open(Emptied(inner, "run/attempts/"), "run"), claim)


def test_the_latest_is_never_older_than_the_hint_to_it():
    inner = MemoryStorage()
    manifests = fill(inner)
    stale = CheckpointStore.open(Stale(inner), "run")
    newest = commit(CheckpointStore.open(inner, "run"), 50, attempt=2)
    assert stale.latest().id == manifests[-1].id
    stale.hint_latest(newest.id)
    assert stale.latest().id == choose_checkpoint(stale, lineage=1, verify="none").id == newest.id
    assert [it.id for it in stale.newest_first()] == [it.id for it in (newest, *manifests[::-1])]


@pytest.mark.parametrize("hint", [None, 1])
@pytest.mark.parametrize("num_left_out", [1, 3, 10])
def test_a_resume_is_from_the_newest_though_listings_leave_it_out(hint, num_left_out):
    inner = MemoryStorage()
    manifests = fill(inner)
    left_out = {manifest.id for manifest in manifests[-num_left_out:]}
    if hint is not None:
        CheckpointStore.open(inner, "run").hint_latest(manifests[hint].id)

    class Partial(OddListings):
        def changed(self, listing):
            return [info for info in listing if not any(it in info.key for it in left_out)]

    class OfManifests(Partial):
        def list(self, prefix, **kwargs):
            return super().list(prefix, **kwargs) if prefix == "run/manifests/" else self.inner.list(prefix, **kwargs)

    partial = CheckpointStore.open(OfManifests(inner), "run")
    assert choose_checkpoint(partial, lineage=1, verify="none") == manifests[-1]
    assert choose_checkpoint(partial, lineage=3, verify="none") is None


def test_a_checkpoint_that_is_once_said_to_be_gone_is_resumed():
    inner = MemoryStorage()
    manifests = fill(inner)

    class OnceGone(WrappedStorage):
        gone = 1

        def get_bytes(self, key):
            if manifests[-1].id in key and self.gone:
                self.gone = 0
                raise FileNotFoundError(key)
            return self.inner.get_bytes(key)

    assert choose_checkpoint(CheckpointStore.open(OnceGone(inner), "run"), lineage=1, verify="none") == manifests[-1]


def test_a_resume_waits_for_a_listing_that_shows_the_data_of_what_it_has_chosen():
    inner = MemoryStorage()
    manifests = fill(inner)

    class NoFolders(WrappedStorage):
        left = 3

        def folders(self, prefix):
            self.left -= 1
            return iter(()) if self.left >= 0 else self.inner.folders(prefix)

    storage = NoFolders(inner)
    with pytest.raises(StorageError, match=f"memory does not list the data of checkpoint {manifests[-1].id}, which are there"):
        choose_checkpoint(CheckpointStore.open(storage, "run"), lineage=1, verify="size")
    retrying = CheckpointStore.open(RetryingStorage(lambda: storage, RetryPolicy(60.0, 0.0, 0.0)), "run")
    assert choose_checkpoint(retrying, lineage=1, verify="size") == manifests[-1]
    assert storage.left == -1


def test_what_is_deleted_and_still_listed_is_passed_over():
    inner = MemoryStorage()
    manifests = fill(inner)
    stale = CheckpointStore.open(Stale(inner), "run")
    assert len(CheckpointStore.open(inner, "run").prune(RetentionPolicy(1)).drop) == 9
    assert [it.id for it in stale.list()] == [manifests[-1].id]
    inner.delete(list(inner._keys))
    assert (stale.latest(), stale.list(), choose_checkpoint(stale, lineage=1, verify="size")) == (None, [], None)
    assert newest_attempt(stale) is None
    assert read_outcomes(stale) == []
    assert stale.prune(BY_ACCURACY).keep == {}


def test_a_training_does_not_count_what_it_has_deleted_among_the_best():
    inner = MemoryStorage()
    for step in range(4):
        commit(CheckpointStore.open(inner, "run"), step, loss=step)
    store = replace(CheckpointStore.open(Stale(inner), "run"), memory=ManifestMemory())
    *deleted, kept = store.list()
    store.prune(RetentionPolicy(1))
    assert [store.memory.recall(it.id) for it in deleted] == [None] * 3
    assert list(store.prune(RetentionPolicy(2, "loss", "min")).keep) == [kept.id]


def test_data_whose_manifest_a_listing_misses_are_no_garbage():
    inner = MemoryStorage()
    manifests = fill(inner)
    stale = Stale(inner)
    missed = f"run/manifests/{manifests[2].id}"
    stale.snapshot = [info for info in stale.snapshot if not info.key.startswith(missed)]
    assert collect_garbage(CheckpointStore.open(stale, "run"), grace_s=-10) == []
    CheckpointStore.open(inner, "run").verify(manifests[2], "size")
