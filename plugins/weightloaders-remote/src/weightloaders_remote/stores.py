"""How a bucket or a server is reached: obstore's stores, with the credentials that the cloud's own tools would use."""

from __future__ import annotations

import configparser
import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from weightloaders.errors import MissingDependencyError, OptionsError, RemoteReadError, SourceNotFoundError
from weightloaders.weights.threads import interruptible
from weightloaders_remote.faults import Fault, fault_of, is_obstores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightloaders_remote.addresses import Address

T = TypeVar("T")

# Our own attempts go on where a connection broke off, so obstore makes none of its own.
_NO_RETRIES: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
# A transfer that takes longer is gone on with by another request. What says why it can't be, or what there is, is read
# whole into memory, and may not come for ever.
_CLIENT = {"timeout": "30s", "connect_timeout": "10s", "read_timeout": "20s"}
_LISTED_WITHIN = 300.0
# What the environment may say of where S3 is, obstore's names for it included.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}
# What of it goes into requests as it stands.
_SENT = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ),
    "gs": ("GOOGLE_BEARER_TOKEN",),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_TOKEN",
    ),
}  # fmt: skip
_SECRET_WORDS = ("key", "secret", "token", "password", "sas", "credential")

_first_process: int | None = None
_lock = threading.Lock()


@dataclass(frozen=True)
class Access:
    """What the options say of how things are reached.

    Args:
        endpoint: The address of the service, if it is not the cloud's own.
        region: The region of the bucket (S3).
        profile: A profile of AWS's files.
        anonymous: Ask without credentials, as for public buckets.
        account: The storage account (Azure).
        config: Further settings of obstore's store, by its own names.

    Raises:
        OptionsError: If the endpoint is no address, or options contradict each other.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    account: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            _check_endpoint("endpoint", self.endpoint)
        for name, value in {"region": self.region, "account": self.account, **self.config}.items():
            _check_sendable(name, value)
        if self.anonymous and self.profile:
            raise OptionsError("anonymous and profile: without credentials no profile is of use; give one of them")
        secret = next((name for name in self.config if any(word in name.lower() for word in _SECRET_WORDS)), None)
        if secret is not None:
            # What is an option ends in config files, in shells' histories and in logs.
            raise OptionsError(
                f"config: {secret!r} is a secret, or leads to one, and so is no option",
                hint="give it to the environment or to the cloud's own files: that is where it is looked for",
            )


def _check_sendable(name: str, value: object) -> None:
    """Refuse what can't be sent: a line break above all, from the file that a value was read from."""
    if isinstance(value, str) and (value != value.strip() or not value.isprintable()):
        # It may be a secret.
        raise OptionsError(
            f"{name}: there is a line break or a blank at one of its ends, or a character that can't be sent",
            hint="set it without; where it is read from a file, $(cat FILE) leaves the line break out",
        )


def _check_endpoint(name: str, value: str) -> None:
    _check_sendable(name, value)
    try:
        parts = urlsplit(value)
        # Asking for the port checks it.
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in value
    except ValueError:
        sound = False
    if not sound or " " in value:
        raise OptionsError(
            f"{name}: it is an address, http://host:port or https://host, without a password in it",
        )


def _check_environment(scheme: str) -> None:
    """Refuse what the environment says of a service and can't be: obstore would panic."""
    for name in _SENT[scheme]:
        _check_sendable(name, os.environ.get(name))
    for name in _ENDPOINTS[scheme]:
        if os.environ.get(name):
            _check_endpoint(name, os.environ[name])


class Store:
    """A bucket, a container or a server, by way of obstore.

    Args:
        store: obstore's own.
        name: How it is called in messages.
        hint: What to do where it does not let us in.
    """

    def __init__(self, store: Any, name: str, hint: str) -> None:
        self._store = store
        self.name = name
        self.hint = hint

    @property
    def has_regions(self) -> bool:
        """Whether a service may be asked in the wrong region."""
        return self.name.startswith("s3:")

    def get(self, key: str, options: Any) -> Any:
        """Ask for an object, or a part of one: obstore's result. Raises `FaultError`."""
        import obstore

        return guarded(lambda: obstore.get(self._store, key, options=options))

    def head(self, key: str) -> Any:
        """What is known of an object. Raises `FaultError`."""
        import obstore

        return guarded(lambda: obstore.head(self._store, key))

    def list(self, prefix: str) -> tuple[list[Any], list[str]]:
        """The objects right below a prefix, and the prefixes. Raises `FaultError`."""
        import obstore

        # Page after page, and each of them may say that there are more.
        found = guarded(lambda: obstore.list_with_delimiter(self._store, prefix or None), _LISTED_WITHIN)
        return list(found["objects"]), list(found["common_prefixes"])


class FaultError(Exception):
    """Carries a `Fault`; it never leaves this package."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


def guarded(call: Callable[[], T], seconds: float | None = None) -> T:
    """What a call of obstore's returns, within this time if one is given.

    Raises:
        FaultError: What it raised, without its text.
    """
    _check_process()
    try:
        return waited_for(call, seconds)
    except BaseException as error:
        if not is_obstores(error):
            raise
        fault = fault_of(error)
    # Out of the `except`, so that the other, whose text may hold a secret, is not its context.
    raise FaultError(fault)


def waited_for(call: Callable[[], T], seconds: float | None = None) -> T:
    """What a call of obstore's returns, which looks for no signals, where Ctrl-C can end it, or the time is limited."""
    if seconds is None and threading.current_thread() is not threading.main_thread():
        return call()
    return interruptible(call, seconds)


def _check_process() -> None:
    """Refuse a forked process: obstore's threads are not in it, and it would wait for them for ever."""
    global _first_process
    with _lock:
        _first_process = _first_process or os.getpid()
    if _first_process != os.getpid():
        raise RemoteReadError(
            "this process was forked from one that has read from remote storage already, and can't",
            hint="start processes with multiprocessing's 'spawn', or read there before anything is read here",
        )


# ------------------------------------------------------------------ the services


def bucket_store(address: Address, access: Access) -> Store:
    """The bucket or container of an address.

    Raises:
        MissingDependencyError: If a profile is asked for that only AWS's own library understands, and it is not there.
        OptionsError: If there is no such profile, or obstore does not take the settings.
    """
    _check_environment(address.scheme)
    make = {"s3": _s3, "gs": _gs, "az": _az}[address.scheme]
    try:
        store = make(address.bucket, access)
    except (OptionsError, MissingDependencyError, SourceNotFoundError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_obstores(error)):
            raise
        # obstore's and boto3's own, whose texts may hold what was set.
        problem = type(error).__name__
    else:
        return Store(store, f"{address.scheme}://{address.bucket}", _WAYS_IN[address.scheme])
    raise OptionsError(
        f"{address.scheme}://{address.bucket} can't be reached with these settings ({problem})",
        hint="check the option config, and what the environment says of the service",
    )


def server_store(root: str) -> Store:
    """A web server; ``root`` is its scheme and host."""
    from obstore.store import HTTPStore

    store = HTTPStore(root, client_options=_client(root), retry_config=_NO_RETRIES)
    return Store(store, root, "check the address; a token goes with headers={'Authorization': ...}")


def _client(*endpoints: str | None) -> Any:
    # What somebody wrote as http:// is meant.
    return {**_CLIENT, "allow_http": any((endpoint or "").lower().startswith("http://") for endpoint in endpoints)}


def _s3(bucket: str, access: Access) -> Any:
    from obstore.store import S3Store

    config: Any = dict(access.config)
    if access.endpoint is not None:
        # The name that goes before all else that the environment says.
        config["aws_endpoint_url_s3"] = access.endpoint
    if access.region is not None:
        config["region"] = access.region
    provider = None
    if access.anonymous:
        config["skip_signature"] = True
    elif access.profile or _profile_is_meant():
        provider = _from_profile(access, config)
    return S3Store(
        bucket,
        config=config,
        client_options=_client(access.endpoint, *(os.environ.get(name) for name in _ENDPOINTS["s3"])),
        retry_config=_NO_RETRIES,
        credential_provider=provider,
    )


def _gs(bucket: str, access: Access) -> Any:
    from obstore.store import GCSStore

    config: Any = dict(access.config)
    if access.endpoint is not None:
        config["base_url"] = access.endpoint
    if access.anonymous:
        config["skip_signature"] = True
    client = _client(access.endpoint, os.environ.get("GOOGLE_BASE_URL"))
    return GCSStore(bucket, config=config, client_options=client, retry_config=_NO_RETRIES)


def _az(container: str, access: Access) -> Any:
    from obstore.store import AzureStore

    config: Any = dict(access.config)
    if access.endpoint is not None:
        config["endpoint"] = access.endpoint
    if access.account is not None:
        config["account_name"] = access.account
    if access.anonymous:
        config["skip_signature"] = True
    named = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING")
    if "account_name" not in config and not any(name in os.environ for name in named):
        raise OptionsError(
            "an az:// address names a container, and nothing says in which storage account it is",
            hint="give account='name', or set AZURE_STORAGE_ACCOUNT_NAME",
        )
    client = _client(access.endpoint, os.environ.get("AZURE_STORAGE_ENDPOINT"))
    return AzureStore(container, config=config, client_options=client, retry_config=_NO_RETRIES)


_WAYS_IN = {
    "s3": "credentials are looked for where the aws command looks: in the environment, in ~/.aws (profile='name'), and "
    "on the machine itself; a public bucket takes anonymous=True",
    "gs": "credentials are looked for where gcloud looks: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth "
    "application-default login`, and on the machine itself; a public bucket takes anonymous=True",
    "az": "credentials are looked for in AZURE_STORAGE_ACCOUNT_KEY and its like, and on the machine itself; a public "
    "container takes anonymous=True, and config={'use_azure_cli': true} asks the az command",
}


# ------------------------------------------------------------------ profiles of AWS


def _aws_files() -> list[Path]:
    """AWS's own files, of which the first has keys (https://docs.aws.amazon.com/sdkref/latest/guide/file-location.html)."""
    names = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    return [Path(os.environ.get(variable) or usual).expanduser() for variable, usual in names.items()]


def _profile_is_meant() -> bool:
    """Whether AWS's tools would go by a profile: not where the environment has keys, or a role's token."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return False
    return bool(os.environ.get("AWS_PROFILE")) or any(file.is_file() for file in _aws_files())


def _from_profile(access: Access, config: dict[str, Any]) -> Any:
    """What gives out a profile's credentials; its region goes into ``config``. None where the files say nothing."""
    name = access.profile or os.environ.get("AWS_PROFILE") or "default"
    settings = _settings(name)
    if settings is None:
        if name == "default":
            return None
        raise OptionsError(
            f"there is no profile {name!r} in {' or '.join(map(str, _aws_files()))}",
            hint="`aws configure list-profiles`",
        )
    if "region" in settings:
        config.setdefault("region", settings["region"])
    keys = settings.get("aws_access_key_id"), settings.get("aws_secret_access_key")
    if all(keys):
        return _Keys(*keys, settings.get("aws_session_token"))
    says_more = any(word in setting for setting in settings for word in ("role", "sso", "credential", "source"))
    if not says_more:
        return None
    if find_spec("boto3") is None:
        raise MissingDependencyError(
            f"the profile {name!r} says more than a pair of keys, which only AWS's own library understands",
            hint="pip install 'weightloaders-remote[aws]'",
        )
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider(import_module("boto3").Session(profile_name=name))


def _settings(profile: str) -> dict[str, str] | None:
    """What both files say of a profile; None where neither knows it."""
    found: dict[str, str] | None = None
    for file in reversed(_aws_files()):
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            # Its text may be shown by the error.
            problem = f"{file} can't be understood"
        else:
            for section in (profile, f"profile {profile}"):
                if parser.has_section(section):
                    found = {**(found or {}), **{key: value for key, value in parser.items(section) if value}}
            continue
        raise OptionsError(problem, hint="`aws configure` writes it anew")
    return found


class _Keys:
    """A pair of keys that stays; the repr of it shows none."""

    def __init__(self, key_id: str | None, secret: str | None, token: str | None) -> None:
        self._keys = {"access_key_id": key_id, "secret_access_key": secret, "token": token, "expires_at": None}

    def __call__(self) -> Any:
        return self._keys
