"""The local cache: whole files, each under what tells its content."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save
from weightloaders_remote import RemoteLoader
from weightloaders_remote.cache import usual_folder

from weightloaders import Checksum, load_into, open_weights
from weightloaders.errors import OptionsError, SourceReadError
from weightloaders.weights.locks import locked

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import S3, Web


def opened(address: str, **options: Any) -> Any:
    """Opened by the loader itself: finding it among all that are installed takes long."""
    return open_weights(address, RemoteLoader, **options)


BIG = torch.arange(5_000_000, dtype=torch.float32)


def model() -> Any:
    return torch.nn.ParameterDict({"big": torch.zeros_like(BIG)})


def load(address: str, cache: Any, verify: Any = None, **options: Any) -> torch.Tensor:
    filled, options = model(), {"cache": cache, **options}
    load_into(filled, address, loader=RemoteLoader, loader_kwargs=options, verify=verify, progress=False)
    return filled["big"].detach()


SUMS = "SHA256SUMS.json"


def files_in(folder: Path) -> list[Path]:
    """All but the checksums that lie beside what was kept."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def address(web: Web) -> str:
    web.files["/m/model.safetensors"] = save({"big": BIG})
    return f"{web.url}/m/model.safetensors"


def test_a_second_load_reads_from_this_disk_and_asks_only_whether_it_is_still_the_same(
    web: Web, address: str, cache: Path
) -> None:
    assert torch.equal(load(address, cache), BIG)
    assert [path.name for path in files_in(cache)] == ["model.safetensors"]
    assert files_in(cache)[0].read_bytes() == web.files["/m/model.safetensors"]
    web.forget()
    assert torch.equal(load(address, cache), BIG)
    assert web.total == 64 << 10


def test_a_bucket_is_cached_as_the_web_is(s3: S3, cache: Path) -> None:
    s3.put("bucket/cached/model.safetensors", save({"big": BIG}))
    for _ in range(2):
        assert torch.equal(load("s3://bucket/cached", cache), BIG)
    assert len(files_in(cache)) == 1


def test_what_has_changed_is_fetched_anew(web: Web, address: str, cache: Path) -> None:
    load(address, cache)
    web.files["/m/model.safetensors"] = save({"big": BIG + 1})
    assert torch.equal(load(address, cache), BIG + 1)
    assert len(files_in(cache)) == 2


def test_looking_at_headers_downloads_nothing_but_uses_what_is_there(web: Web, address: str, cache: Path) -> None:
    with opened(address, cache=cache) as weights:
        assert not files_in(cache)
        assert torch.equal(weights["big"], BIG)
    load(address, cache)
    with opened(address, cache=cache) as weights:
        assert str(cache) in weights.info("big").extents[0].source.name


def test_a_download_that_breaks_leaves_nothing_and_the_next_one_succeeds(web: Web, address: str, cache: Path) -> None:
    web.odd["/m/model.safetensors"] = lambda h: None if h.headers["Range"].startswith("bytes=0-") else (500, {}, b"")
    with pytest.raises(SourceReadError, match="status 500"):
        load(address, cache)
    assert not files_in(cache)
    web.odd.clear()
    assert torch.equal(load(address, cache), BIG)


def test_what_tells_no_change_is_not_kept(web: Web, address: str, cache: Path) -> None:
    web.odd["/m/model.safetensors"] = lambda h: (
        206, {**h.part(web.files["/m/model.safetensors"])[1], "ETag": "", "Last-Modified": ""},
        h.part(web.files["/m/model.safetensors"])[2],
    )  # fmt: skip
    assert torch.equal(load(address, cache), BIG)
    assert not files_in(cache)


def test_two_processes_at_once_download_once(web: Web, address: str, cache: Path) -> None:
    web.before = lambda _: time.sleep(0.05)
    script = f"""
import torch
from weightloaders import open_weights
from weightloaders.api import open_to_read
with open_to_read({address!r}, "weightloaders_remote:RemoteLoader", cache={str(cache)!r}) as weights:
    assert weights["big"].sum() == {BIG.sum().item()!r}
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    running = [subprocess.Popen([sys.executable, "-W", "error", "-c", script], env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert len(files_in(cache)) == 1
    assert web.total < len(web.files["/m/model.safetensors"]) + (1 << 18)


def test_a_process_that_was_stopped_is_not_waited_for_for_ever(
    web: Web, address: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightloaders_remote.cache._STUCK", 0.5)
    load(address, cache)
    (file,) = cache.rglob("*.safetensors")
    file.unlink()
    with locked(file.parent / ".lock"), pytest.raises(SourceReadError, match="by another process") as caught:
        load(address, cache)
    assert str(file.parent / ".lock") in str(caught.value.hint)
    load(address, cache)


def test_what_was_not_used_for_longest_makes_room(web: Web, cache: Path) -> None:
    for name in "abc":
        web.files[f"/{name}.safetensors"] = save({"big": BIG})
    size = f"{int(2.5 * BIG.nbytes)}"
    load(f"{web.url}/a.safetensors", cache, cache_size=int(size))
    load(f"{web.url}/b.safetensors", cache, cache_size=int(size))
    first = next(path for path in files_in(cache) if path.name == "a.safetensors")
    # What was used just now stays, however much there is.
    load(f"{web.url}/c.safetensors", cache, cache_size=int(size))
    assert {path.name for path in files_in(cache)} == {"a.safetensors", "b.safetensors", "c.safetensors"}
    for path in files_in(cache):
        hours = {"a": 5, "b": 4, "c": 3}[path.name[0]]
        age(path, hours)
        age(path.with_name(SUMS), hours)
    # Using it is what counts.
    load(f"{web.url}/a.safetensors", cache, cache_size=int(size))
    assert first.with_name(SUMS).stat().st_mtime > time.time() - 60
    web.files["/d.safetensors"] = save({"big": BIG})
    load(f"{web.url}/d.safetensors", cache, cache_size=int(size))
    assert {path.name for path in files_in(cache)} == {"a.safetensors", "d.safetensors"}


def test_a_cache_that_can_not_be_written_is_named(address: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceReadError, match="can't be kept in the cache") as caught:
        load(address, tmp_path / "file" / "cache")
    assert "cache=False" in str(caught.value.hint)


def test_the_usual_folder_is_among_the_caches_of_the_user(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usual_folder() == tmp_path / "cache-home" / "weightloaders" / "remote"
    monkeypatch.setenv("WEIGHTLOADERS_REMOTE_CACHE", str(tmp_path / "mine"))
    load(address, True)
    assert files_in(tmp_path / "mine")


def age(path: Path, hours: float) -> None:
    os.utime(path, (time.time() - hours * 3600,) * 2)


def test_making_room_touches_nothing_but_what_the_cache_made(web: Web, address: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    load(address, home)
    entry = next(path for path in files_in(home)).parent
    theirs = [
        home / "photos" / "wedding.jpg",
        home / "0123456789abcdef0123456789abcdef" / "thesis.tex",
        entry.parent / "notes" / "of mine.txt",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1000))
        age(path, 9)
    (tmp_path / "elsewhere").mkdir()
    theirs.append(tmp_path / "elsewhere" / "there.safetensors")
    theirs[-1].write_bytes(bytes(1000))
    age(theirs[-1], 9)
    (entry.parent / ("a" * 32)).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    age(entry / "model.safetensors", 5)
    age(entry / SUMS, 5)
    web.files["/m/model.safetensors"] = save({"big": BIG + 1})
    load(address, home, cache_size=1000)
    assert all(path.is_file() for path in theirs)
    assert not entry.exists()


def test_what_a_killed_download_left_is_removed_and_not_the_file_beside_it(address: str, cache: Path) -> None:
    load(address, cache)
    (kept,) = files_in(cache)
    kept.unlink()
    left = kept.with_name(".unfinished-0")
    left.write_bytes(bytes(1000))
    age(left, 5)
    assert torch.equal(load(address, cache, cache_size=1000), BIG)
    assert files_in(cache) == [kept]


def test_a_file_in_the_cache_that_others_cut_off_or_replaced_by_a_link_is_fetched_anew(
    address: str, cache: Path, tmp_path: Path
) -> None:
    load(address, cache)
    (kept,) = files_in(cache)
    kept.write_bytes(b"short")
    assert torch.equal(load(address, cache), BIG)
    (tmp_path / "other").write_bytes(bytes(kept.stat().st_size))
    kept.unlink()
    kept.symlink_to(tmp_path / "other")
    assert torch.equal(load(address, cache), BIG)
    assert not kept.is_symlink()


def test_a_file_in_the_cache_that_others_wrote_to_is_fetched_anew(
    web: Web, address: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(address, cache)
    (kept,) = files_in(cache)
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    assert torch.equal(load(address, cache), BIG)
    assert f"{kept} was changed by others" in caplog.text
    assert kept.read_bytes() == web.files["/m/model.safetensors"]
    # What was only touched, or copied, is the same.
    age(kept, 2)
    web.forget()
    for _ in range(2):
        assert torch.equal(load(address, cache), BIG)
    assert web.total == 2 * (64 << 10)


@pytest.mark.parametrize("sums", [None, "", "[", "{}", '{"files": {"model.safetensors": 3}}', "[" * 4096])
def test_a_file_whose_checksum_was_lost_is_fetched_anew(web: Web, address: str, cache: Path, sums: str | None) -> None:
    load(address, cache)
    (kept,) = files_in(cache)
    if sums is None:
        kept.with_name(SUMS).unlink()
    else:
        kept.with_name(SUMS).write_text(sums)
    web.forget()
    assert torch.equal(load(address, cache), BIG)
    assert web.total >= len(web.files["/m/model.safetensors"])
    assert Checksum.known(kept).digest == hashlib.sha256(kept.read_bytes()).hexdigest()


def test_what_is_in_the_cache_can_be_verified(address: str, cache: Path) -> None:
    assert torch.equal(load(address, cache, verify="sha256"), BIG)
    (kept,) = files_in(cache)
    status = kept.stat()
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    # As a failing disk would do it.
    os.utime(kept, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SourceReadError, match=f"{kept} has the checksum"):
        load(address, cache, verify="sha256")


@pytest.mark.parametrize("named", ["", "a\0b", "~nobody-of-that-name/cache"])
def test_what_can_be_no_folder_is_refused_before_anything_is_asked(web: Web, address: str, named: str) -> None:
    with pytest.raises(OptionsError, match=r"cache: .* can't be a folder"):
        load(address, named)
    assert not web.asked
