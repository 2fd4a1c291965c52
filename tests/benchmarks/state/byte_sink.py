"""An S3-speaking server that takes any amount and keeps little: large objects' sizes, small ones' bytes. Every answer waits.

    python tests/benchmarks/state/byte_sink.py PORT [--latency-ms 50]

What it measures is the client, since nothing behind it is slow but the network that it plays. It does not check signatures.
"""

import argparse
import hashlib
import threading
import time
import uuid
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

KEPT_BYTES = 2**20
_READ_BYTES = 2**20
_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@dataclass
class Object:
    size: int
    etag: str
    data: bytes | None  # None: it was too large to be kept
    changed_s: float = field(default_factory=time.time)


class Sink:
    """The objects of all buckets, by "bucket/key"."""

    def __init__(self):
        self._lock = threading.Lock()
        self._objects = {}
        self._uploads = {}

    def put(self, name, stored):
        with self._lock:
            self._objects[name] = stored

    def get(self, name):
        with self._lock:
            return self._objects.get(name)

    def delete(self, name):
        with self._lock:
            self._objects.pop(name, None)

    def begin(self):
        upload = uuid.uuid4().hex
        with self._lock:
            self._uploads[upload] = {}
        return upload

    def add_part(self, upload, number, stored):
        with self._lock:
            self._uploads[upload][number] = stored

    def complete(self, name, upload):
        with self._lock:
            parts = [part for _, part in sorted(self._uploads.pop(upload).items())]
            kept = None if any(part.data is None for part in parts) else b"".join(part.data for part in parts)
            etag = f"{hashlib.md5(''.join(part.etag for part in parts).encode()).hexdigest()}-{len(parts)}"
            self._objects[name] = Object(sum(part.size for part in parts), etag, kept)
        return etag

    def abort(self, upload):
        with self._lock:
            self._uploads.pop(upload, None)

    def below(self, bucket, prefix, after):
        with self._lock:
            found = [(name, stored) for name, stored in self._objects.items() if name.startswith(f"{bucket}/{prefix}")]
        keys = [(name.partition("/")[2], stored) for name, stored in found]
        return sorted((pair for pair in keys if pair[0] > after), key=lambda pair: pair[0])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer in one packet
    sink: Sink
    latency_s: float

    def do_PUT(self):
        stored = self._take()
        query = self._query()
        if "partNumber" in query:
            self.sink.add_part(query["uploadId"], int(query["partNumber"]), stored)
        elif self._key():
            self.sink.put(self._name(), stored)
        self._answer(200, headers={"ETag": f'"{stored.etag}"'})

    def do_POST(self):
        body = self._take().data
        query, name = self._query(), self._name()
        if "uploads" in query:
            text = f"<Bucket/><Key>{escape(self._key())}</Key><UploadId>{self.sink.begin()}</UploadId>"
            self._answer_xml("InitiateMultipartUploadResult", text)
        elif "uploadId" in query:
            etag = self.sink.complete(name, query["uploadId"])
            self._answer_xml("CompleteMultipartUploadResult", f'<Key>{escape(self._key())}</Key><ETag>"{etag}"</ETag>')
        elif "delete" in query:
            keys = [element.text for element in ET.fromstring(body).iter() if element.tag.endswith("Key")]
            for key in keys:
                self.sink.delete(f"{self._bucket()}/{key}")
            self._answer_xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))
        else:
            self._answer(501)

    def do_DELETE(self):
        query = self._query()
        if "uploadId" in query:
            self.sink.abort(query["uploadId"])
        else:
            self.sink.delete(self._name())
        self._answer(204)

    def do_HEAD(self):
        if not self._key():
            self._answer(200)
            return
        stored = self.sink.get(self._name())
        if stored is None:
            self._answer(404)
        else:
            self._answer(200, headers=_headers(stored), length=stored.size)

    def do_GET(self):
        query = self._query()
        if not self._key():
            self._list(query)
            return
        stored = self.sink.get(self._name())
        if stored is None:
            self._answer_error(404, "NoSuchKey")
        elif stored.data is None:
            self._answer_error(410, "NotKept")
        else:
            start, stop = _range(self.headers.get("Range"), stored.size)
            part = stored.data[start:stop]
            headers = {**_headers(stored), "Content-Range": f"bytes {start}-{stop - 1}/{stored.size}"}
            self._answer(206 if "Range" in self.headers else 200, part, headers)

    def handle_expect_100(self):
        going_on = super().handle_expect_100()
        self.wfile.flush()  # or the client waits for it with its body
        return going_on

    def log_message(self, *args):
        pass

    def _take(self):
        """Read the body and return it as an object; its bytes are not kept where they are many."""
        digest, kept, size = hashlib.md5(usedforsecurity=False), bytearray(), 0
        is_chunked = "aws-chunked" in self.headers.get("Content-Encoding", "") or self.headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING-")
        for piece in _unwrapped(self._pieces) if is_chunked else self._pieces(int(self.headers.get("Content-Length", 0))):
            size += len(piece)
            if size <= KEPT_BYTES:
                digest.update(piece)
                kept += piece
        etag = digest.hexdigest() if size <= KEPT_BYTES else uuid.uuid4().hex
        return Object(size, etag, bytes(kept) if size <= KEPT_BYTES else None)

    def _pieces(self, count):
        if count < 0:  # a line
            yield self.rfile.readline()
            return
        memory = memoryview(bytearray(min(count, _READ_BYTES)))
        while count:
            read = self.rfile.readinto(memory[: min(count, len(memory))])
            if not read:
                raise ConnectionError("the body ended early")
            count -= read
            yield memory[:read]

    def _list(self, query):
        if "location" in query:
            self._answer_xml("LocationConstraint", "")
            return
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = int(query.get("max-keys", 1000))
        found, folders, last, is_cut = [], [], "", False
        for key, stored in self.sink.below(self._bucket(), prefix, after):
            rest = key[len(prefix) :]
            folder = prefix + rest[: rest.index(delimiter) + len(delimiter)] if delimiter and delimiter in rest else None
            if folder is not None and (folder in folders or after.startswith(folder)):
                last = key
                continue
            if len(found) + len(folders) == most:
                is_cut = True
                break
            last = key
            if folder is None:
                found.append((key, stored))
            else:
                folders.append(folder)
        told = [
            f"<Name>{self._bucket()}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found) + len(folders)}</KeyCount>"
        ]
        told.append(f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>")
        told += [f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"] if is_cut else []
        told += [_entry(key, stored) for key, stored in found]
        told += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
        self._answer_xml("ListBucketResult", "".join(told))

    def _answer_error(self, status, code):
        self._answer(status, f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer_xml(self, root, text):
        self._answer(200, f"{_XML}<{root} {_NAMESPACE}>{text}</{root}>".encode(), {"Content-Type": "application/xml"})

    def _answer(self, status, body=b"", headers=None, length=None):
        time.sleep(self.latency_s)
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def _query(self):
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    def _name(self):
        return unquote(urlsplit(self.path).path).removeprefix("/")

    def _bucket(self):
        return self._name().partition("/")[0]

    def _key(self):
        return self._name().partition("/")[2]


def _unwrapped(pieces):
    """Yield the data of an aws-chunked body, which are in chunks of `SIZE[;signature]`, and drop its trailer."""
    while size := int(b"".join(pieces(-1)).partition(b";")[0], 16):
        yield from pieces(size)
        b"".join(pieces(2))
    while b"".join(pieces(-1)).strip():
        pass


def _headers(stored):
    changed = formatdate(stored.changed_s, usegmt=True)
    return {
        "ETag": f'"{stored.etag}"',
        "Last-Modified": changed,
        "Accept-Ranges": "bytes",
        "Content-Type": "binary/octet-stream",
    }


def _entry(key, stored):
    changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.changed_s))
    told = f"<Key>{escape(key)}</Key><LastModified>{changed}</LastModified><ETag>&quot;{stored.etag}&quot;</ETag>"
    return f"<Contents>{told}<Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"


def _range(header, size):
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def serve(port, latency_s):
    class Waiting(Handler):
        sink = Sink()

    Waiting.latency_s = latency_s
    server = ThreadingHTTPServer(("127.0.0.1", port), Waiting)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--latency-ms", type=float, default=50)
    options = parser.parse_args()
    serve(options.port, options.latency_ms / 1e3)
