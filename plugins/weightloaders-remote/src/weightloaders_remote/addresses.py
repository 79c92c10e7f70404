"""What an address of an object names: ``s3://bucket/folder/file``, ``gs://...``, ``az://container/...``."""

from __future__ import annotations

import re
from typing import NamedTuple

from weightloaders.errors import SourceNotFoundError
from weightloaders.weights.file_names import names_weights

#: Scheme -> how the service calls what the first part of an address names.
SCHEMES = {"s3": "bucket", "gs": "bucket", "az": "container"}

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# The rules of the services differ, and have changed over the years; this only tells names from what else people write.
_BUCKET = re.compile(r"[a-z0-9$][a-z0-9._-]{0,254}", re.IGNORECASE)


class Address(NamedTuple):
    """An address taken apart.

    Attributes:
        scheme: ``"s3"``, ``"gs"`` or ``"az"``.
        bucket: The bucket or container.
        folder: The key of the folder, without slashes at its ends; empty for the bucket itself.
        name: The weights file, or index, that is named; empty where the address means a folder.
    """

    scheme: str
    bucket: str
    folder: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.folder}" if self.folder else "")

    @classmethod
    def of(cls, text: str, subfolder: str = "") -> Address:
        """Take an address apart.

        Args:
            text: The address.
            subfolder: A folder within the one that it names.

        Raises:
            SourceNotFoundError: If it is none.
        """
        scheme = scheme_of(text)
        bucket, _, key = text.partition("://")[2].partition("/")
        if scheme not in SCHEMES or not _BUCKET.fullmatch(bucket):
            # Whatever stands before an @ may be a password, so nothing of it is repeated.
            raise SourceNotFoundError(
                f"this {scheme or 'source'}:// address names no {SCHEMES.get(scheme, 'bucket')}",
                hint=f"write {scheme if scheme in SCHEMES else 's3'}://{SCHEMES.get(scheme, 'bucket')}/folder; "
                "keys and passwords are not part of it",
            )
        # One slash at the end is how folders are written; any other belongs to the keys, in which a//b is not a/b.
        parts = key.removesuffix("/").split("/") if key else []
        inside = subfolder.split("/") if subfolder else []
        if not {"", ".", ".."}.isdisjoint((*parts, *inside)):
            raise SourceNotFoundError(
                f"{text} is no address: its folders can't be '.' or '..', or empty",
                file=text,
                hint="write single slashes; an object whose key has such a part must be copied to another key first",
            )
        name = parts.pop() if parts and not inside and not key.endswith("/") and names_weights(parts[-1]) else ""
        return cls(scheme, bucket, "/".join((*parts, *inside)), name)


def scheme_of(text: str) -> str:
    """The scheme of an address, in lower case; empty where there is none."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""
