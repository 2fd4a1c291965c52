import io

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt.storage.digest import CHUNK_BYTES, copy_and_digest, digest_file, write_all


class ShortWriter(io.BytesIO):
    """Takes a part of what it is given, as a raw file may."""

    def __init__(self, most_bytes):
        super().__init__()
        self.most_bytes = most_bytes
        self.num_short = 0

    def write(self, data):
        self.num_short += len(data) > self.most_bytes
        return super().write(data[: self.most_bytes])


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5])
def test_a_copy_is_whole_and_digested_at_any_size(num_bytes):
    data = bytes(range(251)) * (num_bytes // 251 + 1)
    data = data[:num_bytes]
    target = io.BytesIO()
    moved = copy_and_digest(io.BytesIO(data), target)
    assert target.getvalue() == data
    assert (moved.bytes, moved.digest) == (num_bytes, xxhash.xxh3_128_hexdigest(data))


@given(st.binary(max_size=100), st.integers(1, 9))
def test_a_target_that_takes_less_than_it_is_given_gets_all_of_it(data, most_bytes):
    target = ShortWriter(most_bytes)
    copy_and_digest(io.BytesIO(data), target)
    assert target.getvalue() == data
    assert (target.num_short > 0) == (len(data) > most_bytes)


class TakesNothing(io.RawIOBase):
    """A raw file that takes nothing: at once (0), or for now (None)."""

    def __init__(self, count):
        self.count = count

    def write(self, data):
        return self.count


@pytest.mark.parametrize(("count", "error"), [(0, OSError), (None, BlockingIOError)])
def test_a_target_that_takes_nothing_is_an_error_not_a_loop(count, error):
    with pytest.raises(error, match="3 bytes were not written"):
        write_all(TakesNothing(count), b"123")


def test_a_buffered_target_that_says_nothing_has_taken_all():
    class Silent(io.BytesIO):
        def write(self, data):
            super().write(data)

    target = Silent()
    copy_and_digest(io.BytesIO(b"x" * (CHUNK_BYTES + 1)), target)
    assert target.getvalue() == b"x" * (CHUNK_BYTES + 1)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_changed_byte_changes_the_digest(data, draws):
    changed = bytearray(data)
    changed[draws.draw(st.integers(0, len(data) - 1))] ^= draws.draw(st.integers(1, 255))
    digests = {copy_and_digest(io.BytesIO(content), io.BytesIO()).digest for content in (data, bytes(changed))}
    assert len(digests) == 2


def test_a_file_has_the_digest_of_its_copy(tmp_path):
    data = b"weights" * CHUNK_BYTES
    (tmp_path / "x").write_bytes(data)
    assert digest_file(tmp_path / "x") == copy_and_digest(io.BytesIO(data), io.BytesIO())


def test_a_digest_is_32_hexadecimal_digits(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    assert digest_file(tmp_path / "x").digest == "99aa06d3014798d86001c324468d497f"
