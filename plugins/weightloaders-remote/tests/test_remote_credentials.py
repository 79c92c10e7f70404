"""Credentials are found where the cloud's own tools look for them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save
from weightloaders_remote import RemoteLoader

from weightloaders import open_weights
from weightloaders.errors import MissingDependencyError, OptionsError, RemoteReadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Web


def opened(address: str, **options: Any) -> Any:
    """Opened by the loader itself: finding it among all that are installed takes long."""
    return open_weights(address, RemoteLoader, **options)


CONTENT = save({"a": torch.ones(2)})
DENIED = (403, {}, b"<Error><Code>AccessDenied</Code></Error>")


@pytest.fixture
def aws(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes AWS's files; the web server stands in for S3."""
    web.files["/bucket/x.safetensors"] = CONTENT
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(credentials: str, config: str = "") -> None:
        (tmp_path / "credentials").write_text(credentials, encoding="utf-8")
        (tmp_path / "config").write_text(config, encoding="utf-8")

    return write


def keys(name: str) -> str:
    return f"aws_access_key_id = {name}\naws_secret_access_key = s3cr3t\n"


def used(web: Web, **options: Any) -> str:
    """The credential that a load was signed with: key id, date, region, service."""
    web.forget()
    with opened("s3://bucket/x.safetensors", **options) as weights:
        assert weights["a"].tolist() == [1, 1]
    signed = {headers["authorization"].split("Credential=")[1].split(",")[0] for headers in web.headers}
    assert len(signed) == 1
    return signed.pop()


def test_the_environment_comes_first(web: Web, aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    aws("[default]\n" + keys("FROMFILE"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROMENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t0ken")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert used(web).startswith("FROMENVIRONMENT/")
    assert "/eu-west-1/s3/" in used(web)
    assert web.headers[0]["x-amz-security-token"] == "t0ken"
    assert "/ap-south-1/s3/" in used(web, region="ap-south-1")


def test_the_default_profile_is_taken_and_another_one_by_name(
    web: Web, aws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws(
        "[default]\n" + keys("DEFAULT") + "[other]\n" + keys("OTHER"),
        "[default]\nregion = eu-north-1\n[profile other]\nregion = us-west-2\n",
    )
    assert used(web).startswith("DEFAULT/")
    assert "/eu-north-1/" in used(web)
    assert used(web, profile="other").startswith("OTHER/")
    assert "/us-west-2/" in used(web, profile="other")
    assert "/us-east-2/" in used(web, profile="other", region="us-east-2")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert used(web).startswith("OTHER/")


def test_a_profile_that_is_not_there_is_named(aws: Any, tmp_path: Path) -> None:
    aws("[default]\n" + keys("DEFAULT"))
    with pytest.raises(OptionsError, match="there is no profile 'absent' in ") as caught:
        opened("s3://bucket/x.safetensors", profile="absent")
    assert str(tmp_path / "credentials") in str(caught.value)


def test_a_file_that_can_not_be_understood_is_named_without_its_text(aws: Any) -> None:
    aws("aws_secret_access_key = s3cr3t")
    with pytest.raises(OptionsError, match="credentials can't be understood") as caught:
        opened("s3://bucket/x.safetensors")
    assert "s3cr3t" not in str(caught.value)


def test_a_program_that_hands_out_keys_is_asked_by_way_of_boto3(web: Web, aws: Any, tmp_path: Path) -> None:
    answer = {"Version": 1, "AccessKeyId": "HANDEDOUT", "SecretAccessKey": "s3cr3t"}
    program = tmp_path / "program.py"
    program.write_text(f"print({json.dumps(answer)!r})", encoding="utf-8")
    aws("", f"[profile strange]\ncredential_process = {sys.executable} {program}\n")
    assert used(web, profile="strange").startswith("HANDEDOUT/")


def test_without_boto3_such_a_profile_names_what_to_install(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setattr("weightloaders_remote.stores.find_spec", lambda _: None)
    aws("", "[profile sso]\nsso_session = mine\n")
    with pytest.raises(MissingDependencyError) as caught:
        opened("s3://bucket/x.safetensors", profile="sso")
    assert caught.value.hint == "pip install 'weightloaders-remote[aws]'"


def test_a_machine_in_the_cloud_is_asked_for_its_own_credentials(
    web: Web, aws: Any, serve: Callable[[], Web], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = serve()
    role = {
        "Code": "Success", "AccessKeyId": "OFTHEMACHINE", "SecretAccessKey": "s3cr3t", "Token": "t0ken",
        "LastUpdated": "2026-11-30T00:00:00Z", "Expiration": "2126-11-30T00:00:00Z", "Type": "AWS-HMAC",
    }  # fmt: skip
    metadata.files["/latest/meta-data/iam/security-credentials/"] = b"role"
    metadata.files["/latest/meta-data/iam/security-credentials/role"] = json.dumps(role).encode()
    metadata.odd["/latest/api/token"] = lambda _: (200, {}, b"session")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url)
    assert used(web).startswith("OFTHEMACHINE/")


def test_a_service_that_refuses_says_where_credentials_are_looked_for(web: Web, aws: Any) -> None:
    aws("[default]\n" + keys("DEFAULT"))
    web.odd["/bucket/x.safetensors"] = lambda _: DENIED
    with pytest.raises(RemoteReadError, match=r"does not let us in \(status 403, AccessDenied\)") as caught:
        opened("s3://bucket/x.safetensors")
    assert "~/.aws" in str(caught.value.hint)
    assert (caught.value.status, caught.value.code) == (403, "AccessDenied")


def test_a_bucket_in_another_region_names_the_region(web: Web, aws: Any) -> None:
    aws("[default]\n" + keys("DEFAULT"))
    web.odd["/bucket/x.safetensors"] = lambda _: (
        400, {}, b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>expecting 'eu-central-1'</Message></Error>",
    )  # fmt: skip
    with pytest.raises(RemoteReadError) as caught:
        opened("s3://bucket/x.safetensors")
    assert caught.value.hint == "the bucket is in another region: region='eu-central-1'"


def test_google_takes_a_token_and_a_key_file_from_the_environment(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.files["/bucket/x.safetensors"] = CONTENT
    monkeypatch.setenv("GOOGLE_BASE_URL", web.url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "t0ken")
    with opened("gs://bucket/x.safetensors") as weights:
        assert weights["a"].tolist() == [1, 1]
    assert {headers["authorization"] for headers in web.headers} == {"Bearer t0ken"}


def test_azure_takes_a_key_from_the_environment(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    web.files["/bucket/x.safetensors"] = CONTENT
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    with opened("az://bucket/x.safetensors", endpoint=web.url) as weights:
        assert weights["a"].tolist() == [1, 1]
    assert web.headers[0]["authorization"].startswith("SharedKey account:")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ACCESS_KEY_ID", "s3cr3t\n"),
        ("AWS_SECRET_ACCESS_KEY", "s3cr3t\n"),
        ("AWS_SESSION_TOKEN", "s3cr3t\r\n"),
        ("AWS_REGION", "us-east-1\n"),
        ("AWS_DEFAULT_REGION", " us-east-1"),
        ("AWS_ENDPOINT_URL", "localhost:9000"),
        ("AWS_ENDPOINT_URL_S3", "http://"),
        ("AWS_ENDPOINT", "http://user:s3cr3t@127.0.0.1:9"),
    ],
)
def test_what_the_environment_says_is_checked_before_anything_is_asked(
    web: Web, aws: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionsError, match=f"^{name}: ") as caught:
        opened("s3://bucket/x.safetensors")
    assert "s3cr3t" not in str(caught.value)
    assert not web.asked


@pytest.mark.parametrize(
    ("option", "value"),
    [("endpoint", "http://"), ("endpoint", "http://a b"), ("endpoint", "http://[::1"), ("region", "us-east-1\n")],
)
def test_options_that_can_not_be_sent_are_refused(option: str, value: str) -> None:
    with pytest.raises(OptionsError, match=f"{option}: "):
        opened("s3://bucket/x.safetensors", **{option: value})


def test_what_makes_obstore_panic_is_an_error_of_ours_without_what_was_set(web: Web, aws: Any) -> None:
    # A value of these files may go on in the next line.
    aws("[default]\naws_access_key_id = s3cr3t\n  more\naws_secret_access_key = s3cr3t\n")
    for address in ("s3://bucket/x.safetensors", "s3://bucket/folder"):
        with pytest.raises(RemoteReadError, match="can't be asked for with these settings") as caught:
            opened(address)
        assert "s3cr3t" not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"
