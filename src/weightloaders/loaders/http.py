"""The loader ``http``: checkpoints at an http or https address, read in parts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from weightloaders.errors import OptionsError, SourceNotFoundError
from weightloaders.loaders.base import BaseWeightLoader, Probe
from weightloaders.loaders.web import WebFolder, split_address
from weightloaders.weights.candidates import Wanted
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import OTHER_FORMATS, suffix_of
from weightloaders.weights.files import select_listed
from weightloaders.weights.http import is_web_address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders.weights.weights import Weights


class HttpLoader(BaseWeightLoader):
    """Safetensors and PyTorch files at an ``https://`` or ``http://`` address. Nothing is downloaded: parts are read.

    An address that ends in the name of a weights file (or of an index) means that file; any other means a folder, in
    which the usual names are looked for: the index, then the single file; ``model.safetensors`` before
    ``pytorch_model.bin`` before ``consolidated.safetensors``. The server must serve ranges, as storage services and
    nearly all web servers do.

    Args:
        headers: Sent with each request, such as ``{"Authorization": "Bearer ..."}``; to no other host, should the
            server lead to one. A name and password may also stand in the address, and a signature in its query.
        include_unindexed: Read also the tensors in the files that the index omits.
        max_header_bytes: A longer safetensors header is refused. Default: the limit of the safetensors package, 100 MB.
        key: Dotted path to the state dict within each ``.bin``, where several could be meant.
        safe_globals: Classes and functions that a ``.bin`` may use because you trust them; also by name, as
            ``"package.module:name"``.

    Raises:
        OptionsError: If a header can't be one.
    """

    description: ClassVar[str] = "safetensors and .bin at an https address, read in parts"

    def __init__(
        self,
        headers: dict[str, str] | None = None,
        include_unindexed: bool = False,
        max_header_bytes: int | None = None,
        key: str | None = None,
        safe_globals: Sequence[Any] = (),
    ) -> None:
        self._headers = checked_headers(headers or {})
        self.wanted = Wanted(include_unindexed=include_unindexed)
        self.max_header_bytes = max_header_bytes
        self.key = key
        self.safe_globals = tuple(safe_globals)

    def get_weights(self, model_name_or_path: str) -> Weights:
        """Catalogue the checkpoint at an address, from its headers.

        Args:
            model_name_or_path: The address of a file, an index or a folder.

        Raises:
            SourceNotFoundError: If it is no address, or there are no weights.
            IncompleteCheckpointError: If a file or tensor that the index names is absent.
            RemoteReadError: If the server can't be reached, refuses, or does not serve ranges.
            SourceError: If a file is not what it should be; see `weightloaders.errors`.
        """
        from weightloaders.weights.catalogue import catalogue

        if not is_web_address(model_name_or_path):
            raise SourceNotFoundError(
                f"{model_name_or_path!r} is no http or https address",
                file=model_name_or_path,
                hint="files on disk are read by the loaders 'local', 'torch' and 'hf'",
            )
        url, name = split_address(model_name_or_path)
        return catalogue(
            select_listed(WebFolder(url, self._headers), name, self.wanted),
            max_header_bytes=self.max_header_bytes,
            key=self.key,
            safe_globals=self.safe_globals,
        )

    @classmethod
    def probe(cls, path: str) -> Probe:
        """Whether it is an address; the server is not asked."""
        if not is_web_address(path):
            return Probe.no("no web address")
        other = OTHER_FORMATS.get(suffix_of(shown(path).rpartition("/")[2]))
        if other is not None:
            return Probe.no(f"its format is {other}")
        # A package for remote storage may do it faster, and goes before.
        return Probe.maybe("a web address")


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that can be sent.

    Raises:
        OptionsError: If one can't be.
    """
    for name, value in headers.items():
        # Sent as it is, HTTP's error about it would show the value, which may be a secret.
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[!-~]([ -~]*[!-~])?", value):
            raise OptionsError(f"headers: {name!r} can't be sent: its name or value has characters that no header has")
    return dict(headers)
