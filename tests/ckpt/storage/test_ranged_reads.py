"""Objects read in ranges: in order, whole, in bounded memory."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
import pytest
from certificates import make_certificate
from prefect_torch.ckpt import StorageError
from prefect_torch.ckpt.storage.object_store.backend import ObstoreStorage
from prefect_torch.ckpt.storage.object_store.ranged_reads import RANGE_BYTES, read_in_order, read_range_with_status_200
from servers import S3Server


def read_from(data):
    def read(start, into):
        part = data[start : start + len(into)]
        into[: len(part)] = part
        return len(part)

    return read


@pytest.mark.parametrize("size", [0, 1, RANGE_BYTES, RANGE_BYTES + 1, 16 * RANGE_BYTES, 17 * RANGE_BYTES + 3, 40 * RANGE_BYTES])
def test_all_bytes_come_once_and_in_order(size):
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    taken = bytearray()
    read_in_order(size, read_from(data), taken.extend)
    assert taken == data


@pytest.mark.parametrize("size", [3 * RANGE_BYTES, 40 * RANGE_BYTES])
def test_an_object_that_ends_early_gives_what_it_has(size):
    data = bytes(size - RANGE_BYTES - 5)
    taken = bytearray()
    read_in_order(size, read_from(data), taken.extend)
    assert taken == data


@pytest.mark.parametrize("size", [3 * RANGE_BYTES, 40 * RANGE_BYTES])
def test_nothing_is_taken_behind_a_range_that_came_short(size):
    taken = []
    read_in_order(size, lambda start, into: 7 if start == RANGE_BYTES else len(into), lambda data: taken.append(len(data)))
    assert taken == [RANGE_BYTES, 7]


@pytest.mark.parametrize("size", [3 * RANGE_BYTES, 40 * RANGE_BYTES])
def test_an_error_of_any_range_is_raised(size):
    def read(start, into):
        if start == 2 * RANGE_BYTES:
            raise ConnectionResetError
        return len(into)

    with pytest.raises(ConnectionResetError):
        read_in_order(size, read, lambda _: None)


def test_eight_ranges_of_a_large_object_are_on_their_way_at_once_in_as_much_memory():
    together, buffers = threading.Barrier(8), set()

    def read(_, into):
        together.wait(30)
        buffers.add(id(into.obj))
        return len(into)

    read_in_order(24 * RANGE_BYTES, read, lambda _: None)
    assert len(buffers) == 8


@pytest.mark.parametrize(("start", "asked"), [(10, [(10, 20)]), (90, [(90, 20), (90, 10)])])
def test_a_range_that_a_server_cannot_read_is_cut_at_the_end_of_the_object_and_then_given_up(monkeypatch, start, asked):
    requests = []

    def refuse(_store, _key, *, start, length):
        requests.append((start, length))
        raise obstore.exceptions.GenericError("Server returned 500 Internal Server Error")

    monkeypatch.setattr(obstore, "get_range", refuse)
    monkeypatch.setattr(obstore, "head", lambda _store, _key: {"size": 100})
    storage = ObstoreStorage("s3://bucket", {"aws_access_key_id": "x", "aws_secret_access_key": "x", "aws_region": "x"})
    with pytest.raises(StorageError, match="500"):
        storage.get_range("key", start, memoryview(bytearray(20)))
    assert requests == asked


@pytest.mark.parametrize("trust", ["root_certificate", "allow_invalid_certificates"])
def test_a_range_with_the_status_of_a_whole_object_is_read_from_a_server_with_a_certificate_of_its_own(tmp_path, trust):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Range", "bytes 3-6/9")
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"3456")

        def log_message(self, *args):
            pass

    context, certificate = make_certificate(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        options = S3Server(f"https://127.0.0.1:{server.server_port}").options()
        value = certificate if trust == "root_certificate" else "true"
        storage = ObstoreStorage("s3://bucket", {**options, trust: value})
        into = bytearray(4)
        assert read_range_with_status_200(storage._store, "x", 3, memoryview(into)) == 4
        server.shutdown()
    assert into == b"3456"
