"""`prefect-torch doctor`: what it finds in order, and what it says of what is not."""

import logging
import os
import re
import resource
import shutil
import tempfile

import pytest
from google_server import keeping_objects, service_account_key
from prefect.settings import (
    PREFECT_API_KEY,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    temporary_settings,
)
from prefect_servers import api_that_answers
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.deployments.command_line.doctor import machine_checks, software_checks
from prefect_torch.deployments.command_line.doctor.software_checks import FASTAPI, SQLALCHEMY
from prefect_torch.tasks.prefect_api.embedded_server import tying
from servers import free_port


def test_the_doctor_finds_nothing_wrong_here(storage, as_json):
    with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}):
        findings = {it["check"]: it for it in as_json("doctor", storage)}
    software = {"python", "prefect", "fastapi", "sqlalchemy", "prefect api", "torch"}
    assert software | {"gpus", "backends", "loopback", "storage"} <= set(findings)
    assert [it["found"] for it in findings.values() if it["status"] == "wrong"] == []
    assert findings["storage"]["found"].startswith(f"{storage}: wrote, listed, read and deleted in ")
    assert list(CheckpointStore.open(storage, "x").storage.list("")) == []


def test_the_doctor_leaves_no_folder_behind_where_there_was_none(as_json, tmp_path):
    findings = as_json("doctor", tmp_path / "new/storage")
    assert findings[-1]["status"] == "ok"
    assert not (tmp_path / "new").exists()


def test_what_the_doctor_finds_wrong_ends_with_1_and_says_what_to_do(command, tmp_path):
    (tmp_path / "file").write_text("no folder")
    code, out, _ = command("doctor", tmp_path / "file")
    assert code == 1
    assert re.search(r"^wrong +storage +.*/file does not write: .* -> let this user write there", out, re.MULTILINE)
    assert re.search(r"^ok +temporary files +/", out, re.MULTILINE)  # the longest name of a check


def test_the_doctor_does_not_repeat_a_password(command):
    code, out, _ = command("doctor", "s3://user:secret@bucket")
    assert code == 1
    assert "URL holds credentials" in out
    assert "secret" not in out


def test_a_number_of_ranks_needs_a_cluster(command):
    code, _, err = command("doctor", "--ranks", "3")
    assert code == 2
    assert "--cluster" in err


def test_doctor_names_what_a_bucket_of_google_keeps_and_bills(as_json, prefect_server):
    gcp = pytest.importorskip("prefect_gcp")
    with keeping_objects() as (endpoint, objects):
        credentials = gcp.GcpCredentials(service_account_info=service_account_key(endpoint))
        gcp.GcsBucket(bucket="bucket", gcp_credentials=credentials).save("doctored", overwrite=True)
        findings = [it for it in as_json("doctor", "gcs-bucket/doctored") if it["check"] == "storage"]
        assert objects == {}
    assert [it["status"] for it in findings] == ["ok", "warning", "warning"]
    assert "AbortIncompleteMultipartUpload" in findings[1]["advice"]
    assert "--clear-soft-delete" in findings[2]["advice"]


def test_a_storage_that_forgets_to_delete_is_wrong(command, local, monkeypatch):
    monkeypatch.setattr("prefect_torch.ckpt.storage.local_files.storage.LocalStorage.delete", lambda storage, keys: None)
    code, out, _ = command("doctor", local)
    assert code == 1
    assert "does not forget: it still lists ['prefect-torch-probe-" in out
    shutil.rmtree(local)


@pytest.mark.parametrize(("installed", "status"), [("3.8.3", "wrong"), ("3.8.4", "ok"), ("3.9.0rc1", "ok"), ("4.0.0", "wrong")])
def test_another_prefect_than_this_package_requires_is_found(monkeypatch, installed, status):
    monkeypatch.setattr(software_checks, "version", {"prefect": installed}.__getitem__)
    (finding,) = software_checks.check_prefect()
    assert finding.status == status
    assert finding.advice == ("pip install 'prefect<4,>=3.8.4'" if status == "wrong" else "")


@pytest.mark.parametrize(
    ("library", "installed", "prefect", "url", "status"),
    [
        (FASTAPI, "0.145.0", "3.8.8", None, "ok"),
        (FASTAPI, "0.151.0", "3.8.8", None, "wrong"),
        (FASTAPI, "0.155.1", "3.6.0", "http://there/api", "warning"),
        (FASTAPI, "0.155.1", "3.9.0", None, "ok"),
        (SQLALCHEMY, "2.0.58", "3.8.8", None, "ok"),
        (SQLALCHEMY, "2.1.0", "3.8.8", None, "warning"),
    ],
)
def test_a_library_that_prefects_server_cannot_use_is_found(monkeypatch, library, installed, prefect, url, status):
    monkeypatch.setattr(software_checks, "version", {library.name: installed, "prefect": prefect}.__getitem__)
    with temporary_settings({PREFECT_API_URL: url}):
        (finding,) = software_checks.check_server_library(library)
    assert finding.status == status
    assert (f"pip install '{library.name}<" in finding.advice) == (status != "ok")


@pytest.mark.parametrize(("status", "expected"), [(200, "ok"), (401, "wrong"), (500, "wrong")])
def test_prefects_api_is_asked(status, expected):
    with api_that_answers(status):
        finding, *more = software_checks.check_api()
    assert (finding.check, finding.status) == ("prefect api", expected), finding
    assert "127.0.0.1" in finding.found
    assert "secret" not in finding.found
    assert [(it.check, it.status) for it in more] == ([("deployments", "ok"), ("restarts", "ok")] if expected == "ok" else [])


def test_an_api_that_is_away_is_wrong():
    with temporary_settings({PREFECT_API_URL: f"http://user:secret@127.0.0.1:{free_port()}/api"}):
        (finding,) = software_checks.check_api()
    assert finding.status == "wrong"
    assert "prefect server start" in finding.advice
    assert "secret" not in finding.found


def test_no_api_and_none_allowed_is_wrong():
    with temporary_settings({PREFECT_API_URL: None, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}):
        (finding,) = software_checks.check_api()
    assert (finding.status, finding.advice) == ("wrong", "set PREFECT_API_URL")


def test_a_key_of_prefect_cloud_without_its_url_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(tying, "get_run_logger", logging.getLogger)  # as of a flow run
    no_api = {PREFECT_API_URL: None, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}
    with temporary_settings({**no_api, PREFECT_API_KEY: "pnu_1"}):
        (finding,) = software_checks.check_api()
        tying.tie_running_servers()
    assert finding.status == "warning"
    assert "PREFECT_API_KEY is set, but PREFECT_API_URL is not" in finding.found
    assert f"{finding.found}: {finding.advice}" in caplog.text
    with temporary_settings({**no_api, PREFECT_API_KEY: None}):
        (finding,) = software_checks.check_api()
    assert finding.status == "ok"


def test_a_home_in_which_no_server_can_keep_its_database_is_wrong(tmp_path):
    (tmp_path / "file").touch()
    no_api = {PREFECT_API_URL: None, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}
    with temporary_settings({**no_api, PREFECT_HOME: tmp_path / "file/home"}):
        (finding,) = software_checks.check_api()
    assert finding.status == "wrong"
    assert str(tmp_path / "file/home") in finding.found
    assert finding.advice.startswith("set PREFECT_HOME")


def test_a_torch_with_gpus_and_without_nccl_is_wrong(monkeypatch):
    monkeypatch.setattr("prefect_torch.tasks.rank.resources.device.gpu_type", lambda: "cuda")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    (finding,) = machine_checks.check_backends()
    assert (finding.status, finding.found) == ("wrong", "gloo; nccl is missing")


def test_no_directory_for_temporary_files_is_wrong(monkeypatch):
    (found,) = machine_checks.check_temporary_files()
    assert (found.status, found.found) == ("ok", tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/missing"])
    (found,) = machine_checks.check_temporary_files()
    assert (found.status, found.found) == ("wrong", "No usable temporary directory found in ['/missing']")
    assert "TMPDIR" in found.advice


def test_little_shared_memory_and_few_files_are_warnings(monkeypatch, tmp_path):
    (missing,) = machine_checks.check_shared_memory(tmp_path / "none")
    assert (missing.status, missing.found) == ("warning", "missing")
    few = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: few)
    (little,) = machine_checks.check_shared_memory(tmp_path)
    assert (little.status, little.found) == ("warning", "64.0 MiB, 64.0 MiB free")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    (files,) = machine_checks.check_open_files()
    assert (files.status, files.found) == ("warning", "256, at most 4096")
    assert files.advice == "ulimit -n 1024 or more, for data loaders"  # a training raises it for its ranks itself
