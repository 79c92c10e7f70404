"""`RemoteLoader`: which files lie at an address, and who reads them."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 -- options are checked by their annotations
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

# Its names are resolved on first use. Like obstore, torch is not needed for listing the loaders.
import weightloaders as wl
from weightloaders.errors import ModelError, OptionsError, SourceError, SourceNotFoundError
from weightloaders.loaders.http import checked_headers
from weightloaders.weights.discretion import shown
from weightloaders.weights.file_names import PARAMS_FILE
from weightloaders.weights.http import HttpSource, is_web_address
from weightloaders_remote.addresses import SCHEMES, Address, scheme_of
from weightloaders_remote.stores import Access, Store, bucket_store, server_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightloaders_remote.cache import Cache


class RemoteLoader(wl.BaseWeightLoader):
    """Checkpoints in S3 (``s3://``), Google Cloud Storage (``gs://``) and Azure (``az://``), and on web servers.

    An address that ends like a weights file (or an index) means that file; any other means a folder, of which the files
    are chosen by the same rules as on disk. Who reads them is found as on disk, too: every format whose loader reads
    listings is read from here (`BaseWeightLoader.get_listed_weights`). Credentials are looked for where the cloud's own
    tools look for them, and are never options.

    Args:
        endpoint: The address of the service where it is not the cloud's own, e.g. ``"http://127.0.0.1:9000"``.
        region: The region of the bucket (S3). Default: what the environment or the profile says.
        profile: A profile of AWS's own files (S3).
        anonymous: Ask without credentials, as public buckets want it.
        account: The storage account (Azure).
        config: Further settings of obstore's store, by its own names; no secrets.
        headers: Sent with each request to a web address, but to no other host, should the server lead to one.
        subfolder: A folder within the one that is named.
        cache: Download whole files into a local cache, and read them there; True for the usual folder, or a folder.
        cache_size: How much is kept in it; what was not used for longest goes first.
        reader: The loader that reads the files, by name.
        reader_options: Further options for that loader.
        file_pattern: A glob for the names of the files to read. This and what follows is the reader's part, as on disk.
        variant: A precision variant: ``"fp16"`` reads ``model.fp16.safetensors``.
        ignore_index: Read all files that match, whatever an index says.
        include_unindexed: Read also the files and tensors that the index omits.
        key: Dotted path to the state dict within each ``.bin``, where several could be meant.
        safe_globals: Classes and functions that a ``.bin`` may use because you trust them; also by name.

    Raises:
        OptionsError: If options contradict each other, or can't be.
    """

    description: ClassVar[str] = "s3://, gs://, az:// and https://, read in parts by obstore"

    def __init__(
        self,
        endpoint: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        anonymous: bool = False,
        account: str | None = None,
        config: dict[str, str | int | bool] | None = None,
        headers: dict[str, str] | None = None,
        subfolder: str | None = None,
        cache: bool | str | Path = False,
        cache_size: int | str = "200GB",
        reader: str = "auto",
        reader_options: dict[str, Any] | None = None,
        file_pattern: str | None = None,
        variant: str | None = None,
        ignore_index: bool = False,
        include_unindexed: bool = False,
        key: str | None = None,
        safe_globals: Sequence[Any] = (),
    ) -> None:
        if "remote" in reader.split(":"):
            raise OptionsError("reader: it is the loader of the files themselves; give its name, or nothing")
        self._access = Access(endpoint, region, profile, anonymous, account, config or {})
        self._headers = checked_headers(headers or {})
        self._subfolder = (subfolder or "").strip("/")
        self._cache = None if cache is False else _cache_in(cache, cache_size)
        self._reader = reader
        said = {
            "file_pattern": file_pattern,
            "variant": variant,
            "ignore_index": ignore_index,
            "include_unindexed": include_unindexed,
            "key": key,
            "safe_globals": safe_globals,
        }
        # Not every reader has all of these; one that is asked for something that it can't do says so.
        self._reader_options = {name: value for name, value in said.items() if value not in (None, False, ())}
        self._reader_options |= reader_options or {}
        self._stores: dict[str, Store] = {}
        self._folders: dict[tuple[str, str], wl.Listing] = {}
        self._readers: dict[tuple[str, str], wl.BaseWeightLoader] = {}

    def get_weights(self, model_name_or_path: str) -> wl.Weights:
        """Catalogue the checkpoint at an address, from its headers.

        Args:
            model_name_or_path: The address of a file, an index or a folder.

        Raises:
            SourceNotFoundError: If it is no address, or there are no weights.
            RemoteReadError: If the service can't be reached, refuses, or does not serve parts.
            SourceError: If a file is not what it should be; see `weightloaders.errors`.
            OptionsError: If the loader that reads the files does not take the options.
        """
        listing, name = self._place(model_name_or_path)
        if not name:
            # What keeps it from being listed is said before any loader is asked.
            _ = listing.names
        reader = self._reader_for(listing, name)
        # The next load looks again: what lies there may be another one by then.
        self._folders.clear()
        self._readers.clear()
        return reader.get_listed_weights(listing, name)

    def get_model_files(self, model_name_or_path: str, needed: str = "") -> Path | wl.Listing | None:
        """Where config and tokenizer lie: within the weights, where their format holds these, or beside them."""
        listing, name = self._place(model_name_or_path)
        try:
            reader = self._reader_for(listing, name)
        except SourceError:
            # A folder with a config need not hold weights.
            reader = None
        try:
            found = None if reader is None else reader.get_listed_model_files(listing, name, needed)
        except SourceError:
            if needed and listing.problems([needed]):
                # What keeps the reader from telling is why there is none.
                raise
            found = None
        if found is not None:
            return found
        if is_web_address(model_name_or_path):
            return None
        if needed == "config.json" and listing.problems([needed]) and not listing.problems([PARAMS_FILE]):
            raise ModelError(
                f"there is no config in {listing.where}: it is in Meta's layout",
                file=listing.where,
                hint="name who makes one of params.json: reader='meta' (pip install weightloaders-meta)",
            )
        return listing

    @classmethod
    def probe(cls, path: str) -> wl.Probe:
        """Whether it is an address; nobody is asked."""
        if scheme_of(path) in SCHEMES:
            return wl.Probe.yes(f"an address of a {SCHEMES[scheme_of(path)]}")
        return wl.Probe.yes("a web address") if is_web_address(path) else wl.Probe.no("no address")

    def _reader_for(self, listing: wl.Listing, name: str) -> wl.BaseWeightLoader:
        """Who reads the files of a place; the same each time, for he may have prepared something."""
        from weightloaders.loaders.auto import AutoLoader

        place = listing.where, name
        if place not in self._readers:
            reader = wl.WeightLoaderRegistry.create(self._reader, **self._reader_options)
            self._readers[place] = reader.choose_for(listing, name) if isinstance(reader, AutoLoader) else reader
        return self._readers[place]

    # -- places

    def _place(self, text: str) -> tuple[wl.Listing, str]:
        """The folder that an address leads to, and the name of the file in it; empty for the folder itself."""
        if is_web_address(text):
            where, name = self._on_the_web(text)
        elif scheme_of(text) in SCHEMES:
            address = Address.of(text, self._subfolder)
            where, name = str(address), address.name
        else:
            raise SourceNotFoundError(
                f"{shown(text)!r} is no address of s3://, gs://, az:// or https://",
                file=shown(text),
                hint="files on disk are read by the loaders 'local', 'torch' and 'hf'",
            )
        # Kept until the weights are opened, with the beginnings of its files: config and tokenizer are asked for first.
        if (where, text) not in self._folders:
            found = self._web_folder(where) if is_web_address(text) else self._object_folder(address)
            self._folders[where, text] = found
        return self._folders[where, text], name

    def _object_folder(self, address: Address) -> wl.Listing:
        from weightloaders_remote.objects import ObjectFolder

        root = f"{address.scheme}://{address.bucket}"
        if root not in self._stores:
            self._stores[root] = bucket_store(address, self._access)
        return self._kept(ObjectFolder(self._stores[root], address))

    def _on_the_web(self, url: str) -> tuple[str, str]:
        from weightloaders.loaders.web import split_address

        return split_address(url) if not self._subfolder else (url, "")

    def _web_folder(self, url: str) -> wl.Listing:
        from weightloaders.loaders.web import WebFolder

        return self._kept(WebFolder(url, self._headers, self._subfolder, self._web_source))

    def _web_source(self, url: str, headers: Mapping[str, str]) -> wl.ByteSource:
        parts = urlsplit(url)
        if headers or parts.query or "@" in parts.netloc:
            # What lets us in must reach no other host: obstore would take headers along wherever a server leads.
            return HttpSource(url, headers)
        from weightloaders_remote.objects import ObjectSource

        root = f"{parts.scheme}://{parts.netloc}"
        if root not in self._stores:
            self._stores[root] = server_store(root)
        return ObjectSource(self._stores[root], unquote(parts.path).lstrip("/"), shown(url))

    def _kept(self, listing: wl.Listing) -> wl.Listing:
        if self._cache is None:
            return listing
        from weightloaders_remote.cache import CachedFolder

        return CachedFolder(listing, self._cache)


def _cache_in(folder: bool | str | Path, size: int | str) -> Cache:
    from weightloaders.validation import parse_size
    from weightloaders_remote.cache import Cache, as_folder, usual_folder

    return Cache(usual_folder() if isinstance(folder, bool) else as_folder(folder, "cache"), parse_size(size))
