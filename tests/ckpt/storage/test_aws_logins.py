"""The login, region and endpoint of S3, compared with those of AWS' own tools in the same environment."""

import json
import textwrap
import traceback
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import botocore.session
import obstore
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.utils import ContainerMetadataFetcher
from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.storage.object_store import multipart_uploads
from prefect_torch.ckpt.storage.object_store.backend import ObstoreStorage
from prefect_torch.ckpt.storage.object_store.waits import Waits
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.protocol import RetryPolicy, StorageSpec
from servers import S3Server, ScriptedServer

A_MINUTE = timedelta(minutes=1)
KEYS = {"AWS_ACCESS_KEY_ID": "variable", "AWS_SECRET_ACCESS_KEY": "x"}
TOKEN = {"AWS_SESSION_TOKEN": "token of variable"}
NO_KEYS = {"AWS_PROFILE": "bare"}
LAB = {"AWS_PROFILE": "lab"}
ROLE = {"AWS_WEB_IDENTITY_TOKEN_FILE": "TOKEN", "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/pod"}
CONFIG = """
    [default]
    region = eu-west-1

    [profile lab]
    region = eu-west-3
    endpoint_url = http://lab:9000

    [profile sections]
    region = eu-west-3
    endpoint_url = http://lab:9000
    services = of-lab

    [services of-lab]
    s3 =
      endpoint_url = http://section:9000
    sts =
      endpoint_url = http://sts:9000

    [profile china]
    region = cn-north-1

    [profile dual]
    region = eu-west-3
    use_dualstack_endpoint = true

    [profile fips]
    region = eu-west-3
    use_fips_endpoint = true

    [profile role]
    role_arn = arn:aws:iam::123456789012:role/profile
    source_profile = lab

    [profile bare]
    region = ap-south-1

    [profile pod]
    role_arn = arn:aws:iam::123456789012:role/pod
    web_identity_token_file = /missing

    [profile sso]
    sso_start_url = https://lab.example/start
    sso_region = eu-west-3
    sso_account_id = 123456789012
    sso_role_name = lab

    [profile code]
    role_arn = arn:aws:iam::123456789012:role/profile
    source_profile = lab
    mfa_serial = arn:aws:iam::123456789012:mfa/me

    [profile empty]
    output = json

    [profile broken]
    services = missing
"""
CREDENTIALS = "\n".join(
    f"[{name}]\naws_access_key_id = of {name}\naws_secret_access_key = x"
    for name in ("default", "lab", "sections", "china", "dual", "fips")
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that sets the variables of a machine with these profiles."""
    (tmp_path / "config").write_text(textwrap.dedent(CONFIG))
    (tmp_path / "credentials").write_text(CREDENTIALS)
    (tmp_path / "token").write_text("token")

    def set_variables(variables):
        files = {"AWS_CONFIG_FILE": tmp_path / "config", "AWS_SHARED_CREDENTIALS_FILE": tmp_path / "credentials"}
        for name, value in {**files, **variables}.items():
            monkeypatch.setenv(name, str(tmp_path / "token") if value == "TOKEN" else str(value))

    return set_variables


def _signed_for(url):
    """Return host, key, region and token of a presigned URL."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    key, _, region, _, _ = query["X-Amz-Credential"][0].split("/")
    return f"{parts.scheme}://{parts.netloc}", key, region, query.get("X-Amz-Security-Token")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        KEYS,
        {**KEYS, **TOKEN},
        TOKEN,
        LAB,
        {**LAB, **KEYS},
        {**LAB, **KEYS, **TOKEN},
        {"AWS_DEFAULT_PROFILE": "lab"},
        {**LAB, "AWS_DEFAULT_REGION": "us-west-2"},
        {**LAB, **KEYS, "AWS_DEFAULT_REGION": "us-west-2", "AWS_ENDPOINT_URL": "http://variable:9000"},
        {**LAB, "AWS_ENDPOINT_URL": "http://variable:9000"},
        {**LAB, "AWS_ENDPOINT_URL": "http://variable:9000", "AWS_ENDPOINT_URL_S3": "http://s3:9000"},
        {"AWS_PROFILE": "sections"},
        {"AWS_PROFILE": "sections", **KEYS},
        {"AWS_PROFILE": "bare", **KEYS},
        {"AWS_PROFILE": "china"},
        {**KEYS, "AWS_DEFAULT_REGION": "cn-northwest-1"},
        {**KEYS, "AWS_DEFAULT_REGION": "us-gov-west-1"},
        {**KEYS, "AWS_DEFAULT_REGION": "us-iso-east-1"},
        {**KEYS, "AWS_DEFAULT_REGION": "us-east-1"},
        {"AWS_PROFILE": "dual"},
        {**KEYS, **ROLE},
    ],
    ids=lambda variables: "-".join(f"{name.removeprefix('AWS_').lower()}={value}" for name, value in variables.items()),
)
def test_a_bucket_is_requested_as_aws_own_tools_would_request_it(machine, variables):
    machine(variables)
    style = {"addressing_style": "path", "us_east_1_regional_endpoint": "regional"}
    client = botocore.session.Session().create_client("s3", config=Config(signature_version="s3v4", s3=style))
    theirs = client.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "x"})
    ours = obstore.sign(ObstoreStorage("s3://bucket", {})._store, "GET", "x", A_MINUTE)
    assert _signed_for(ours) == _signed_for(theirs)


FIPS = {**KEYS, "AWS_USE_FIPS_ENDPOINT": "true"}


@pytest.mark.parametrize("bucket", ["bucket", "with.dots"])
@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_PROFILE": "fips", "AWS_DEFAULT_REGION": "us-west-2"},
        {**FIPS, "AWS_DEFAULT_REGION": "us-west-2"},
        {**FIPS, "AWS_DEFAULT_REGION": "us-gov-west-1"},
        {**FIPS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_USE_DUALSTACK_ENDPOINT": "true"},
    ],
    ids=["profile", "variable", "gov", "dualstack"],
)
def test_a_fips_endpoint_has_the_host_of_the_bucket_that_aws_own_tools_request(machine, variables, bucket):
    machine(variables)
    client, asked = botocore.session.Session().create_client("s3"), []

    def answer(request, **_):
        asked.append(urlsplit(request.url))
        return AWSResponse(request.url, 200, {}, SimpleNamespace(stream=list))

    client.meta.events.register("before-send.s3", answer)
    client.head_object(Bucket=bucket, Key="run/x")
    ours = urlsplit(obstore.sign(ObstoreStorage(f"s3://{bucket}", {})._store, "GET", "run/x", A_MINUTE))
    assert [(it.netloc, it.path) for it in asked] == [(ours.netloc, ours.path)]


def test_uploads_to_a_fips_endpoint_are_aborted_at_the_host_of_the_bucket(machine):
    machine({**FIPS, "AWS_DEFAULT_REGION": "us-west-2"})
    client = multipart_uploads._client(ObstoreStorage("s3://bucket", {})._store, True, None, Waits(1, 1))
    assert urlsplit(client.generate_presigned_url("list_multipart_uploads", {"Bucket": "bucket"})).netloc == (
        "bucket.s3-fips.us-west-2.amazonaws.com"
    )


@pytest.mark.parametrize("variables", [ROLE, {**LAB, **ROLE}, {"AWS_PROFILE": "role"}, {"AWS_PROFILE": "role", **ROLE}])
def test_a_role_is_the_one_that_aws_own_tools_would_assume(machine, variables):
    machine(variables)
    (session,) = ObstoreStorage("s3://bucket", {})._store.credential_provider.args
    assert session.get_credentials().method == botocore.session.Session().get_credentials().method


def test_a_pod_with_a_web_identity_has_the_credentials_of_its_role(machine, moto: S3Server):
    machine({**ROLE, "AWS_ENDPOINT_URL": moto.endpoint, "AWS_REGION": "eu-west-2"})
    storage = ObstoreStorage(f"s3://{moto.new_bucket()}", {})
    storage.put_bytes("run/x", b"1")
    assert storage.get_bytes("run/x") == b"1"


def test_the_regions_of_the_options_and_of_aws_region_come_before_all_others(machine):
    machine({**LAB, "AWS_DEFAULT_REGION": "us-west-1", "AWS_REGION": "us-west-2"})
    assert ObstoreStorage("s3://bucket", {})._store.config["region"] == "us-west-2"
    assert ObstoreStorage("s3://bucket", {"region": "eu-central-1"})._store.config["region"] == "eu-central-1"


def test_an_empty_default_region_is_none(machine):
    machine({**LAB, "AWS_DEFAULT_REGION": ""})
    assert ObstoreStorage("s3://bucket", {})._store.config["region"] == "eu-west-3"
    machine({"AWS_PROFILE": "empty", **KEYS})
    assert ObstoreStorage("s3://bucket", {})._store.config["region"] == "us-east-1"


def test_the_region_of_another_server_may_have_any_name(machine):
    machine({"AWS_PROFILE": "default"})
    storage = ObstoreStorage("s3://bucket", {"aws_region": "my_region", "aws_endpoint_url": "http://minio:9000"})
    assert storage._store.config["region"] == "my_region"


def test_a_setting_of_aws_own_tools_that_is_none_is_a_value_error(machine):
    machine({**KEYS, "AWS_RETRY_MODE": "always"})
    with pytest.raises(ValueError, match=r'"always" must be one of.*: fix .* the AWS_… variables'):
        ObstoreStorage("s3://bucket", {})


def test_keys_in_the_options_have_no_token_of_others(machine):
    machine({**KEYS, **TOKEN, "AWS_REGION": "eu-west-1"})
    keys = {"aws_access_key_id": "given", "aws_secret_access_key": "x"}
    for token in ({}, {"aws_session_token": "given, too"}):
        store = ObstoreStorage("s3://bucket", {**keys, **token})._store
        url = obstore.sign(store, "GET", "x", A_MINUTE)
        assert _signed_for(url)[1:] == ("given", "eu-west-1", list(token.values()) or None)


def test_a_section_of_the_profile_that_is_missing_is_named(machine):
    machine({"AWS_PROFILE": "broken", **KEYS})
    with pytest.raises(ValueError, match=r'"missing" services configuration does not exist.*: fix ~/.aws/config'):
        ObstoreStorage("s3://bucket", {})


def test_a_profile_that_does_not_exist_is_named(machine):
    machine({"AWS_PROFILE": "nowhere"})
    with pytest.raises(ValueError, match=r"nowhere.*fix AWS_PROFILE"):
        ObstoreStorage("s3://bucket", {})


@pytest.mark.parametrize("region", [None, "cn-north-1"])
def test_keys_need_no_profile_on_a_machine_to_which_the_variables_were_copied(machine, region):
    """They are, for ranks on other machines, which may have no configuration of AWS' tools."""
    machine({"AWS_PROFILE": "nowhere", **KEYS, **({} if region is None else {"AWS_DEFAULT_REGION": region})})
    keys = {"aws_access_key_id": "given", "aws_secret_access_key": "x"}
    for options, key in (({}, "variable"), (keys, "given")):
        url = obstore.sign(ObstoreStorage("s3://bucket", options)._store, "GET", "x", A_MINUTE)
        host = "eu-west-1.amazonaws.com" if region is None else "cn-north-1.amazonaws.com.cn"
        assert _signed_for(url)[:3] == (f"https://s3.{host}", key, region or "eu-west-1")


@pytest.mark.parametrize(
    "variables",
    [{**ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": "/missing"}, {"AWS_PROFILE": "pod"}],
    ids=["variable", "profile"],
)
def test_a_login_without_its_file_is_told_at_once(machine, variables):
    machine(variables)
    storage = open_storage(StorageSpec("s3://bucket", {"aws_endpoint_url": "http://127.0.0.1:1"}, RetryPolicy(60.0)))
    with pytest.raises(OSError, match=r"credentials for .* cannot be fetched: .*'/missing'.*; fix .* or the profile that"):
        storage.get_bytes("x")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({**ROLE, "AWS_ROLE_ARN": "pod"}, "length for parameter RoleArn, value: 3.*; fix AWS_ROLE_ARN"),
        ({**ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": "/dev/null"}, "length for parameter WebIdentityToken, value: 0"),
        ({"AWS_PROFILE": "sso"}, "https://lab.example/start does not exist; log in with `aws sso login`"),
        ({"AWS_PROFILE": "code"}, "MFA token required.*; give a login"),
    ],
    ids=["arn", "token", "sso", "code"],
)
def test_a_login_that_no_server_can_accept_is_told_at_once(machine, monkeypatch, variables, reason):
    monkeypatch.setattr("getpass.getpass", input)  # without a terminal, as in a rank
    machine(variables)
    storage = open_storage(StorageSpec("s3://bucket", {"aws_endpoint_url": "http://127.0.0.1:1"}, RetryPolicy(60.0, 0, 0)))
    with pytest.raises(OSError, match=rf"credentials for .* cannot be fetched: .*{reason}"):
        storage.get_bytes("x")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("credential_process = sh -c 'echo no ticket >&2; exit 3'", "custom-process: no ticket; fix ~/.aws/config"),
        ("credential_process = /missing/tool", "credential_process must write JSON .*'/missing/tool'"),
        ("credential_process = echo secret", "credential_process must write JSON .*JSONDecodeError"),
        ("credential_process = echo []", "credential_process must write JSON"),
        ("aws_access_key_id = half", "missing: aws_secret_access_key; fix ~/.aws/config"),
        ("role_arn = arn:aws:iam::123456789012:role/x\nsource_profile = nowhere", 'source_profile "nowhere" .* does not exist'),
    ],
    ids=["fails", "missing", "no-json", "no-object", "half", "source"],
)
def test_a_login_that_cannot_be_used_is_told_without_its_keys(machine, tmp_path, settings, reason):
    machine({"AWS_PROFILE": "wrong"})
    with (tmp_path / "config").open("a") as config:
        config.write(f"[profile wrong]\n{settings}\n")
    with pytest.raises(ValueError, match=rf"the login of the AWS profile 'wrong' cannot be used: .*{reason}") as caught:
        ObstoreStorage("s3://bucket", {})
    assert caught.value.__context__ is None  # a JSONDecodeError has the whole output


def test_an_agent_of_the_container_that_does_not_answer_yet_is_asked_again(machine, monkeypatch, moto: S3Server):
    """A pod may start before the agent of its node."""
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
    end = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    keys = {"AccessKeyId": "a", "SecretAccessKey": "x", "Token": "t", "Expiration": end}
    with ScriptedServer.answering(503, "{}") as starting, ScriptedServer.answering(200, json.dumps(keys)) as agent:
        machine({**NO_KEYS, "AWS_CONTAINER_CREDENTIALS_FULL_URI": starting.endpoint, "AWS_ENDPOINT_URL": moto.endpoint})
        storage = ObstoreStorage(f"s3://{moto.new_bucket()}", {})
        with pytest.raises(StorageError, match=r"cannot be fetched at the moment: .*container-role.*503"):
            storage.put_bytes("x", b"1")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", agent.endpoint)
        storage.put_bytes("x", b"1")
        assert agent.requests


def test_an_agent_of_the_container_that_is_none_is_told_at_once(machine):
    machine({**NO_KEYS, "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://agent.example/"})
    with pytest.raises(ValueError, match=r"cannot be used: ValueError: Unsupported host 'agent\.example'"):
        ObstoreStorage("s3://bucket", {})


@pytest.mark.parametrize("endpoint", ["me:secret@minio:9000", "http://me:secret@minio 1:9000", "http://me:secret@"])
def test_an_endpoint_of_a_profile_that_is_no_address_is_refused_without_its_login(machine, tmp_path, endpoint):
    machine({"AWS_PROFILE": "wrong"})
    with (tmp_path / "config").open("a") as config:
        config.write(f"[profile wrong]\nendpoint_url = {endpoint}\n")
    with pytest.raises(ValueError, match="the endpoint_url of the AWS profile 'wrong' is no address of a server") as caught:
        ObstoreStorage("s3://bucket", {})
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_login_in_an_endpoint_is_not_shown(machine):
    machine(KEYS)
    options = {"aws_endpoint_url": "http://me:secret@127.0.0.1:1", "aws_region": "eu-west-1"}
    storage = open_storage(StorageSpec("s3://bucket", options, RetryPolicy(0.1)))
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:1/bucket/x") as caught:
        storage.get_bytes("x")
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_credentials_are_asked_for_again_before_they_end(machine, tmp_path):
    end = datetime.now(timezone.utc) + timedelta(minutes=11)  # botocore gives them until ten minutes before
    keys = {"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "x", "SessionToken": "t", "Expiration": end.isoformat()}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    machine({"AWS_PROFILE": "process"})
    with (tmp_path / "config").open("a") as config:
        config.write(f"[profile process]\ncredential_process = cat {tmp_path}/keys.json\n")
    given = ObstoreStorage("s3://bucket", {})._store.credential_provider()
    assert given["access_key_id"] == "a"
    assert given["expires_at"] <= end
