"""What every storage must do; a backend's test is a subclass with two fixtures."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from prefect_torch.ckpt import StorageError
from prefect_torch.ckpt.storage.protocol import Transfer
from prefect_torch.ckpt.storage.retry import classify


def listed(storage, prefix, after=None):
    """Return the keys that a listing tells, which may come in any order."""
    return sorted(info.key for info in storage.list(prefix, after=after))


class StorageContract:
    """Subclasses give the fixtures `storage`, an empty one, and `raw_keys`, which looks behind its back.

    `raw_keys()` returns the keys that lie there, asked of the backend itself.

    Attributes:
        num_many: A number of objects, more than a page of listings and deletions, for backends that have pages.

    """

    num_many = 1005

    @pytest.mark.parametrize("size", [0, 1, 1000, 9 * 2**20 + 3])
    def test_a_file_comes_back_with_the_digest_of_its_bytes(self, storage, tmp_path, size):
        data = bytes(range(251)) * (size // 251 + 1)
        (tmp_path / "in").write_bytes(data[:size])
        sent = storage.put_file("run/checkpoints/x/model.pt", tmp_path / "in")
        received = storage.get_file("run/checkpoints/x/model.pt", tmp_path / "out")
        assert sent == received
        assert (sent.bytes, sent.digest) == (size, xxhash.xxh3_128_hexdigest(data[:size]))
        assert (tmp_path / "out").read_bytes() == data[:size]
        assert storage.size("run/checkpoints/x/model.pt") == size

    def test_a_file_of_another_size_than_expected_is_not_read(self, storage, tmp_path):
        storage.put_bytes("run/x", b"larger")
        assert storage.get_file("run/x", tmp_path / "out", 1) == Transfer(6, "")
        assert not (tmp_path / "out").exists()
        assert storage.get_file("run/x", tmp_path / "out", 6) == storage.digest("run/x")
        assert (tmp_path / "out").read_bytes() == b"larger"
        with pytest.raises(FileNotFoundError):
            storage.get_file("run/nothing", tmp_path / "out", 6)

    @pytest.mark.parametrize("owned", [False, True])
    def test_files_stored_together_come_back_with_the_digests_of_their_bytes(self, storage, raw_keys, tmp_path, owned):
        sizes = {"a": 0, "b/x": 1, "b/y": 1000, "b/c/big": 9 * 2**20 + 3}
        files = {}
        for name, size in sizes.items():
            files[f"run/checkpoints/x/{name}"] = path = tmp_path / name.replace("/", "-")
            path.write_bytes((name.encode() * (size // len(name) + 1))[:size])
        data = {key: path.read_bytes() for key, path in files.items()}
        stored = storage.put_files(files, owned=owned)
        assert all(stored[key].digest == xxhash.xxh3_128_hexdigest(of_key) for key, of_key in data.items())
        assert [*stored] == [*files]
        assert {key: storage.get_bytes(key) for key in files} == data
        assert raw_keys() == set(data)
        assert owned or all(path.exists() for path in files.values())
        storage.put_files({}, owned=owned)

    def test_files_stored_together_must_exist_and_stay_below_the_storage(self, storage, tmp_path):
        (tmp_path / "in").write_bytes(b"x")
        for owned in (False, True):
            with pytest.raises(FileNotFoundError):
                storage.put_files({"run/x": tmp_path / "in", "run/y": tmp_path / "vanished"}, owned=owned)
        (tmp_path / "in").write_bytes(b"x")
        with pytest.raises(ValueError, match="storage key"):
            storage.put_files({"../x": tmp_path / "in"})

    def test_bytes_are_replaced_whole(self, storage):
        storage.put_bytes("run/latest.json", b"the first and longer one")
        storage.put_bytes("run/latest.json", b"second")
        assert storage.get_bytes("run/latest.json") == b"second"

    def test_what_is_missing_is_a_file_not_found(self, storage, tmp_path):
        with pytest.raises(FileNotFoundError):
            storage.get_bytes("run/nothing")
        with pytest.raises(FileNotFoundError):
            storage.get_file("run/nothing", tmp_path / "out")
        with pytest.raises(FileNotFoundError):
            storage.size("run/nothing")
        assert not (tmp_path / "out").exists()
        assert list(storage.list("run/")) == []

    def test_a_source_that_vanished_is_a_file_not_found_and_stores_nothing(self, storage, tmp_path):
        with pytest.raises(FileNotFoundError):
            storage.put_file("run/x", tmp_path / "vanished")
        assert list(storage.list("run/")) == []

    def test_a_listing_tells_all_that_is_below_its_prefix(self, storage):
        keys = ["a/b/c", "a/b-c", "a/b", "a/a", "ab/x", "a/b.json"]
        keys.remove("a/b")  # a filesystem cannot hold both a file and a folder of one name
        for key in keys:
            storage.put_bytes(key, b"1")
        assert listed(storage, "a/") == ["a/a", "a/b-c", "a/b.json", "a/b/c"]
        assert listed(storage, "") == ["a/a", "a/b-c", "a/b.json", "a/b/c", "ab/x"]
        assert listed(storage, "a/b/") == ["a/b/c"]

    def test_a_listing_begins_after_a_key_that_need_not_exist(self, storage):
        for key in ["m/000001-a.json", "m/000002-b.json", "m/000003-c.json"]:
            storage.put_bytes(key, b"1")
        assert listed(storage, "m/", "m/000002-b.json") == ["m/000003-c.json"]
        assert listed(storage, "m/", "m/000002") == ["m/000002-b.json", "m/000003-c.json"]
        assert listed(storage, "m/", "m/000004") == []

    def test_a_listing_after_a_key_leaves_out_no_folder_whose_name_sorts_behind(self, storage):
        keys = [f"m/{name}{rest}" for name in ("1-a", "1-b", "2-a") for rest in (".json", "/eval.json")]
        for key in keys:
            storage.put_bytes(key, b"1")
        assert set(listed(storage, "m/", "m/1-")) == set(keys)
        assert set(listed(storage, "m/", "m/1-aa")) == set(keys[2:])

    def test_folders_are_told_by_name_and_not_what_lies_in_them(self, storage):
        for key in ["f/a/x", "f/a/b/y", "f/a-1/x", "f/file", "g/x"]:
            storage.put_bytes(key, b"1")
        assert sorted(storage.folders("f/")) == ["a", "a-1"]
        assert sorted(storage.folders("")) == ["f", "g"]
        assert list(storage.folders("nothing/")) == []

    def test_a_listing_knows_every_put_and_delete_before_it(self, storage):
        for number in range(4):
            storage.put_bytes(f"fresh/{number}.json", b"1")
            storage.put_bytes(f"fresh/{number}/x", b"1")
            storage.delete([f"fresh/{number - 1}.json"])
            expected = [f"fresh/{number}.json", *(f"fresh/{at}/x" for at in range(number + 1))]
            assert listed(storage, "fresh/") == sorted(expected)

    def test_a_listing_tells_sizes_and_times(self, storage):
        storage.put_bytes("t/x", b"12345")
        (info,) = storage.list("t/")
        assert info.bytes == 5
        assert info.modified_s > 1_600_000_000

    def test_more_objects_than_a_page_are_listed_and_deleted(self, storage):
        keys = [f"many/{number:05d}" for number in range(self.num_many)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: storage.put_bytes(key, b""), keys))
        assert listed(storage, "many/") == keys
        assert listed(storage, "many/", keys[-5]) == keys[-4:]
        storage.delete(keys)
        assert list(storage.list("many/")) == []

    @pytest.mark.parametrize(
        "name", ["with space", "ünïcödé", "100%25", "a+b=c", "a#b", "a?b&c", "[x]{y}", "~t", "a*b", "a%2Fb"]
    )
    def test_odd_names_are_names(self, storage, raw_keys, tmp_path, name):
        (tmp_path / "in").write_bytes(b"odd")
        key = f"odd/{name}/file"
        storage.put_file(key, tmp_path / "in")
        assert raw_keys() == {key}
        assert [info.key for info in storage.list("odd/")] == [key]
        assert storage.get_bytes(key) == b"odd"
        storage.delete([key])
        assert list(storage.list("odd/")) == []

    @pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "..", "a//b", "a/", "a\\b", "a\0b", "a\ud800", "."])
    def test_a_key_that_leads_elsewhere_is_refused(self, storage, tmp_path, key):
        (tmp_path / "in").write_bytes(b"x")
        with pytest.raises(ValueError, match="storage key"):
            storage.put_file(key, tmp_path / "in")
        with pytest.raises(ValueError, match="storage key"):
            storage.put_bytes(key, b"x")
        with pytest.raises(ValueError, match="storage key"):
            storage.get_bytes(key)
        with pytest.raises(ValueError, match="storage key"):
            storage.delete([key])

    @pytest.mark.parametrize("prefix", ["../", "../outside/", "a/../../outside/", "/etc/"])
    def test_a_prefix_that_leads_elsewhere_is_refused(self, storage, prefix):
        with pytest.raises(ValueError, match="storage key"):
            list(storage.list(prefix))

    def test_a_folder_is_no_object(self, storage, tmp_path):
        storage.put_bytes("f/x", b"1")
        with pytest.raises(FileNotFoundError):
            storage.get_bytes("f")
        with pytest.raises(FileNotFoundError):
            storage.get_file("f", tmp_path / "out")
        with pytest.raises(FileNotFoundError):
            storage.size("f")

    def test_names_may_begin_like_those_of_temporary_files(self, storage):
        storage.put_bytes("n/.tmp-mine", b"1")
        assert [info.key for info in storage.list("n/")] == ["n/.tmp-mine"]

    def test_deleting_what_is_missing_is_harmless(self, storage, raw_keys):
        for key in ("d/x", "d/y", "keep"):
            storage.put_bytes(key, b"1")
        storage.delete(["d/never", "d/x", "d/neither", "d/y"])
        storage.delete(["d/x"])
        storage.delete([])
        assert raw_keys() == {"keep"}

    def test_threads_may_share_it(self, storage, tmp_path):
        (tmp_path / "in").write_bytes(b"x" * 100_000)
        with ThreadPoolExecutor(8) as pool:
            moved = list(pool.map(lambda n: storage.put_file(f"shared/{n}", tmp_path / "in"), range(32)))
        assert len(set(moved)) == 1
        assert sum(info.bytes for info in storage.list("shared/")) == 3_200_000

    @pytest.mark.parametrize("sizes", [[], [0], [1, 0, 999], [9 * 2**20 + 3], [9 * 2**20, 5, 8 * 2**20]])
    def test_buffers_become_one_object_with_the_digest_of_its_bytes(self, storage, raw_keys, sizes):
        memory = bytearray(bytes(range(251)) * (sum(sizes) // 251 + 1))
        ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
        parts = [memoryview(memory)[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        sent = storage.put_buffers("run/checkpoints/x/state", parts)
        data = bytes(memory[: sum(sizes)])
        assert (sent.bytes, sent.digest) == (sum(sizes), xxhash.xxh3_128_hexdigest(data))
        assert storage.get_bytes("run/checkpoints/x/state") == data
        assert raw_keys() == {"run/checkpoints/x/state"}

    def test_a_range_is_read_into_memory_as_far_as_it_goes(self, storage):
        data = bytes(range(251)) * 1000
        storage.put_bytes("run/x", data)
        into = bytearray(1000)
        assert storage.get_range("run/x", 5, memoryview(into)[:100]) == 100
        assert bytes(into) == data[5:105] + bytes(900)
        assert storage.get_range("run/x", len(data) - 10, memoryview(into)) == 10
        assert bytes(into[:10]) == data[-10:]
        assert storage.get_range("run/x", 0, memoryview(into)[:0]) == 0
        with pytest.raises(FileNotFoundError):
            storage.get_range("run/nothing", 0, memoryview(into))

    def test_a_range_beyond_the_end_reads_nothing(self, storage):
        storage.put_bytes("run/x", b"123")
        assert storage.get_range("run/x", 10, memoryview(bytearray(5))) == 0

    @pytest.mark.parametrize("key", ["/etc/passwd", "a/../b"])
    def test_buffers_and_ranges_take_no_key_that_leads_elsewhere(self, storage, key):
        with pytest.raises(ValueError, match="storage key"):
            storage.put_buffers(key, [memoryview(b"x")])
        with pytest.raises(ValueError, match="storage key"):
            storage.get_range(key, 0, memoryview(bytearray(1)))


class PartialWrites:
    """Has files of the class `name` of `owner` take half of each write, and counts how often that was less than all.

    Attributes:
        lies: Whether a file says that it took all.

    """

    def __init__(self, monkeypatch, owner, name):
        self.num_short = 0
        self.lies = False
        counter = self

        class Partial(getattr(owner, name)):
            def write(self, data):
                taken = memoryview(data)[: max(1, len(data) // 2)]
                counter.num_short += len(taken) < len(data)
                super().write(taken)
                return len(data) if counter.lies else len(taken)

        monkeypatch.setattr(owner, name, Partial)


class WholeWritesContract:
    """What a storage must do that writes files itself.

    Subclasses give the fixture `partial_writes` besides, a PartialWrites of the files that their storage writes.
    """

    writes = ("bytes", "file", "buffers")  # with which put

    @pytest.fixture(params=["bytes", "file", "buffers"])
    def put(self, request, storage, tmp_path):
        if request.param not in self.writes:
            pytest.skip("this put writes no file by itself")
        data = bytes(range(200))
        (tmp_path / "in").write_bytes(data)
        return {
            "bytes": lambda: storage.put_bytes("run/x", data),
            "file": lambda: storage.put_file("run/x", tmp_path / "in"),
            "buffers": lambda: storage.put_buffers("run/x", [memoryview(data)]),
        }[request.param]

    def test_a_file_that_takes_a_part_of_each_write_gets_all_of_it(self, storage, partial_writes, put):
        put()
        assert partial_writes.num_short > 0
        assert storage.get_bytes("run/x") == bytes(range(200))

    def test_what_is_stored_short_is_no_success_and_may_work_later(self, storage, raw_keys, partial_writes, put):
        partial_writes.lies = True
        with pytest.raises((OSError, StorageError), match=r"100 of 200 bytes") as caught:
            put()
        assert partial_writes.num_short > 0
        assert classify(caught.value) == "transient"
        assert raw_keys() == set()
