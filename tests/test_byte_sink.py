"""The S3 server of the benchmarks that keeps nothing large: clients see what they have put."""

import sys
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from servers import free_port, running

SINK = Path(__file__).parent / "benchmarks" / "state" / "byte_sink.py"
LARGE = 9 * 2**20


@pytest.fixture(scope="module")
def sink():
    port = free_port()
    with running([sys.executable, str(SINK), str(port), "--latency-ms", "1"], port) as server:
        yield server


@pytest.fixture
def client(sink):
    return sink.client()


@pytest.fixture
def bucket(sink):
    return sink.new_bucket()


def keys(listed):
    return [entry["Key"] for entry in listed.get("Contents", [])]


def test_a_small_object_comes_back_whole_and_in_parts(client, bucket):
    told = client.put_object(Bucket=bucket, Key="a/b c", Body=b"0123456789")
    assert client.get_object(Bucket=bucket, Key="a/b c")["Body"].read() == b"0123456789"
    assert client.get_object(Bucket=bucket, Key="a/b c", Range="bytes=2-4")["Body"].read() == b"234"
    assert client.get_object(Bucket=bucket, Key="a/b c", Range="bytes=-3")["Body"].read() == b"789"
    head = client.head_object(Bucket=bucket, Key="a/b c")
    assert (head["ContentLength"], head["ETag"]) == (10, told["ETag"])


def test_a_large_object_has_its_size_and_no_bytes(client, bucket, tmp_path):
    (tmp_path / "large").write_bytes(bytes(LARGE))
    client.upload_file(tmp_path / "large", bucket, "parts", Config=TransferConfig(5 * 2**20, multipart_chunksize=5 * 2**20))
    client.put_object(Bucket=bucket, Key="whole", Body=bytes(LARGE))
    assert [client.head_object(Bucket=bucket, Key=key)["ContentLength"] for key in ("parts", "whole")] == [LARGE, LARGE]
    assert client.head_object(Bucket=bucket, Key="parts")["ETag"].endswith('-2"')
    with pytest.raises(ClientError, match="NotKept"):
        client.get_object(Bucket=bucket, Key="whole")


def test_a_list_goes_page_by_page_and_folder_by_folder(client, bucket):
    for key in ("x/1", "x/2", "x/y/3", "x/y/4", "x/z/5", "x0"):
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    pages = [*client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix="x/", Delimiter="/", MaxKeys=3)]
    assert [key for page in pages for key in keys(page)] == ["x/1", "x/2"]
    assert [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])] == ["x/y/", "x/z/"]
    assert keys(client.list_objects_v2(Bucket=bucket, StartAfter="x/y/3")) == ["x/y/4", "x/z/5", "x0"]


def test_what_is_deleted_or_given_up_is_gone(client, bucket):
    for key in ("one", "two", "three"):
        client.put_object(Bucket=bucket, Key=key, Body=b"1")
    client.delete_object(Bucket=bucket, Key="one")
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "two"}]})
    upload = client.create_multipart_upload(Bucket=bucket, Key="four")["UploadId"]
    client.upload_part(Bucket=bucket, Key="four", UploadId=upload, PartNumber=1, Body=b"1")
    client.abort_multipart_upload(Bucket=bucket, Key="four", UploadId=upload)
    assert keys(client.list_objects_v2(Bucket=bucket)) == ["three"]
    for key in ("one", "four"):
        with pytest.raises(ClientError, match="404"):
            client.head_object(Bucket=bucket, Key=key)
