"""What every storage must do; a backend's test is a subclass with two fixtures."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash


class StorageContract:
    """Subclasses give the fixtures `storage`, an empty one, and `raw_keys`, which looks behind its back.

    `raw_keys()` returns the keys that lie there, asked of the backend itself.
    """

    @pytest.mark.parametrize("size", [0, 1, 1000, 20 * 2**20 + 3])
    def test_a_file_comes_back_with_the_digest_of_its_bytes(self, storage, tmp_path, size):
        data = bytes(range(251)) * (size // 251 + 1)
        (tmp_path / "in").write_bytes(data[:size])
        sent = storage.put_file("run/checkpoints/x/model.pt", tmp_path / "in")
        received = storage.get_file("run/checkpoints/x/model.pt", tmp_path / "out")
        assert sent == received
        assert (sent.bytes, sent.digest) == (size, xxhash.xxh3_128_hexdigest(data[:size]))
        assert (tmp_path / "out").read_bytes() == data[:size]
        assert storage.size("run/checkpoints/x/model.pt") == size

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

    def test_a_listing_is_ordered_by_whole_keys_and_stays_below_its_prefix(self, storage):
        keys = ["a/b/c", "a/b-c", "a/b", "a/a", "ab/x", "a/b.json"]
        keys.remove("a/b")  # a filesystem cannot hold both a file and a folder of one name
        for key in keys:
            storage.put_bytes(key, b"1")
        assert [info.key for info in storage.list("a/")] == ["a/a", "a/b-c", "a/b.json", "a/b/c"]
        assert [info.key for info in storage.list("")] == ["a/a", "a/b-c", "a/b.json", "a/b/c", "ab/x"]
        assert [info.key for info in storage.list("a/b/")] == ["a/b/c"]

    def test_a_listing_begins_after_a_key_that_need_not_exist(self, storage):
        for key in ["m/000001-a.json", "m/000002-b.json", "m/000003-c.json"]:
            storage.put_bytes(key, b"1")
        assert [info.key for info in storage.list("m/", after="m/000002-b.json")] == ["m/000003-c.json"]
        assert [info.key for info in storage.list("m/", after="m/000002")] == ["m/000002-b.json", "m/000003-c.json"]
        assert list(storage.list("m/", after="m/000004")) == []

    def test_a_listing_tells_sizes_and_times(self, storage):
        storage.put_bytes("t/x", b"12345")
        (info,) = storage.list("t/")
        assert info.bytes == 5
        assert info.modified_s > 1_600_000_000

    def test_more_objects_than_a_page_are_listed_and_deleted(self, storage):
        keys = [f"many/{number:05d}" for number in range(1005)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: storage.put_bytes(key, b""), keys))
        assert [info.key for info in storage.list("many/")] == keys
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

    @pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "..", "a//b", "a/", "a\\b", "a\0b", "."])
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
