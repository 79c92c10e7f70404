"""What files lie on is told from what the kernel has at hand, and decides how they are read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightloaders.errors import ConfigError
from weightloaders.weights import habits, storage
from weightloaders.weights.habits import habits_of
from weightloaders.weights.source import ByteSource, FileSource
from weightloaders.weights.storage import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable

linux = pytest.mark.skipif(sys.platform != "linux", reason="mountinfo and sysfs are Linux's")


class System:
    """A mountinfo and a sysfs of real files, as a kernel would show them, in place of this machine's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sys = folder / "sys"
        self.mountinfo = folder / "mountinfo"
        (self.sys / "dev/block").mkdir(parents=True)
        (self.sys / "class/block").mkdir(parents=True)
        self.mountinfo.write_text("")

    def disk(self, place: str, number: str, rotational: int | None = None, **files: str) -> Path:
        """A device by its place below /sys/devices."""
        device = self.sys / "devices" / place
        device.mkdir(parents=True)
        if rotational is not None:
            (device / "queue").mkdir()
            (device / "queue/rotational").write_text(f"{rotational}\n")
        for name, text in files.items():
            path = device / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        (self.sys / "dev/block" / number).symlink_to(device)
        (self.sys / "class/block" / device.name).symlink_to(device)
        return device

    def mount(self, filesystem: str, source: str, number: str = "0:0", point: str = "/") -> None:
        with self.mountinfo.open("a") as file:
            file.write(f"36 35 {number} / {point} rw,noatime shared:1 - {filesystem} {source} rw\n")

    def made_of(self, device: Path, *parts: Path) -> None:
        (device / "slaves").mkdir()
        for part in parts:
            (device / "slaves" / part.name).symlink_to(part)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    system = System(tmp_path / "system")
    monkeypatch.setattr(storage, "_MOUNTINFO", system.mountinfo)
    monkeypatch.setattr(storage, "_SYS", system.sys)
    return system


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * 100)
    return path


@pytest.fixture
def number(file: Path) -> str:
    """The device that the file really lies on."""
    device = file.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


# ------------------------------------------------------------------ this machine


@linux
def test_shared_memory_is_memory() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm here")
    found = storage_of("/dev/shm")
    assert (found.kind, found.filesystem) == ("memory", "tmpfs")


def test_what_is_not_there_counts_as_local_and_says_why(tmp_path: Path) -> None:
    found = storage_of(tmp_path / "nowhere")
    assert found.kind == "local"
    assert "nowhere" in found.why or "not looked up" in found.why


@pytest.mark.parametrize("path", ["\0", "x" * 5000])
def test_no_name_raises(path: str) -> None:
    assert storage_of(path).kind == "local"


# ------------------------------------------------------------------ file systems


@linux
@pytest.mark.parametrize(
    ("filesystem", "source", "kind"),
    [
        ("nfs4", "server:/models", "network"),
        ("nfs", "server:/models", "network"),
        ("cifs", "//server/share", "network"),
        ("smb3", "//server/share", "network"),
        ("lustre", "10.0.0.1@tcp:/scratch", "network"),
        ("gpfs", "gpfs0", "network"),
        ("beegfs", "beegfs_nodev", "network"),
        ("ceph", "10.0.0.1:6789:/", "network"),
        ("9p", "drvfs", "network"),
        ("virtiofs", "models", "network"),
        ("fuse.sshfs", "user@host:/models", "network"),
        ("fuse.gcsfuse", "bucket", "network"),
        ("fuse.s3fs", "s3fs", "network"),
        ("fuse.juicefs", "JuiceFS:models", "network"),
        ("fuse.mergerfs", "1:2", "network"),
        ("tmpfs", "tmpfs", "memory"),
        ("ramfs", "none", "memory"),
        ("zfs", "tank/models", "local"),
        ("overlay", "overlay", "local"),
        ("ext4", "/dev/sda1", "local"),
        ("a_new_one", "whatever", "local"),
    ],
)  # fmt: skip
def test_a_file_system_is_told_by_its_name(
    system: System, file: Path, number: str, filesystem: str, source: str, kind: str
) -> None:
    system.mount(filesystem, source, number)
    found = storage_of(file)
    assert (found.kind, found.filesystem, found.device) == (kind, filesystem, source)
    assert found.why


@linux
def test_without_mountinfo_everything_is_local(system: System, file: Path) -> None:
    system.mountinfo.unlink()
    assert storage_of(file).kind == "local"


@linux
@pytest.mark.parametrize("line", ["", "nonsense", "36 35 x:y / / rw - nfs", "1 2 3 4 5 6 - ", " - - - "])
def test_a_mountinfo_that_can_not_be_understood_is_no_error(system: System, file: Path, line: str) -> None:
    system.mountinfo.write_text(f"{line}\n")
    assert storage_of(file).kind == "local"


@linux
def test_a_subvolume_with_a_number_of_its_own_is_found_by_its_place(system: System, tmp_path: Path) -> None:
    # btrfs: neither the mount nor the disk has the number that the file has.
    folder = tmp_path / "my models"
    folder.mkdir()
    system.disk("pci0000:00/nvme0/nvme0n1", "259:0", 0)
    system.disk("pci0000:00/ata1/host0/block/sda", "8:0", 1, device__vendor="ATA", device__model="WDC WD40EFRX")
    system.mount("btrfs", "/dev/nvme0n1", "0:31")
    system.mount("btrfs", "/dev/sda", "0:32", point=str(folder).replace(" ", r"\040"))
    system.mount("nfs4", "server:/", "0:33", point=f"{tmp_path}/my")
    assert storage_of(folder).kind == "rotational"
    assert storage_of(tmp_path).kind == "local"


@linux
def test_of_what_is_mounted_over_one_place_the_last_is_seen(system: System, tmp_path: Path) -> None:
    system.mount("ext4", "/dev/sda", "0:31", point=str(tmp_path))
    system.mount("nfs4", "server:/", "0:32", point=str(tmp_path))
    assert storage_of(tmp_path).kind == "network"


@linux
def test_a_link_counts_as_what_it_leads_to(system: System, tmp_path: Path, file: Path) -> None:
    (tmp_path / "cache").mkdir()
    link = tmp_path / "cache/link.bin"
    link.symlink_to(file)
    system.mount("ext4", "/dev/sda", "0:31")
    system.mount("nfs4", "server:/", "0:32", point=str(tmp_path / "cache"))
    assert storage_of(link).kind == "local"


# ------------------------------------------------------------------ disks


@linux
@pytest.mark.parametrize(("rotational", "kind"), [(0, "local"), (1, "rotational")])
def test_a_disk_says_whether_it_turns(system: System, file: Path, number: str, rotational: int, kind: str) -> None:
    system.disk("pci0000:00/ata1/host0/block/sda", number, rotational, device__vendor="ATA", device__model="ST4000")
    system.mount("ext4", "/dev/sda", number)
    assert storage_of(file).kind == kind


@linux
def test_a_partition_is_as_its_disk(system: System, file: Path, number: str) -> None:
    system.disk("pci0000:00/ata1/host0/block/sda", "8:0", 1)
    system.disk("pci0000:00/ata1/host0/block/sda/sda1", number, partition="1")
    system.mount("ext4", "/dev/sda1", number)
    assert storage_of(file).kind == "rotational"


@linux
@pytest.mark.parametrize(
    ("place", "files"),
    [
        ("pci0000:00/0000:00:02.0/virtio1/block/vda", {}),
        ("pci0000:00/0000:00:02.0/virtio1/host0/target0:0:0/0:0:0:0/block/sda", {"device__vendor": "Google"}),
        ("vbd-51712/block/xvda", {}),
        ("LNXSYSTM:00/VMBUS:00/host0/block/sda", {"device__vendor": "Msft"}),
        ("pci0000:00/host0/block/sda", {"device__vendor": "VMware,", "device__model": "VMware Virtual S"}),
        ("pci0000:00/ata1/host0/block/sda", {"device__vendor": "ATA", "device__model": "QEMU HARDDISK"}),
        ("pci0000:00/ata1/host0/block/sda", {"device__vendor": "ATA", "device__model": "VBOX HARDDISK"}),
    ],
)
def test_a_virtual_disk_that_says_it_turns_is_not_believed(
    system: System, file: Path, number: str, place: str, files: dict[str, str]
) -> None:
    system.disk(place, number, 1, **files)
    system.mount("ext4", "/dev/disk", number)
    found = storage_of(file)
    assert found.kind == "local"
    assert "virtual" in found.why


@linux
@pytest.mark.parametrize(("turning", "kind"), [((0, 0), "local"), ((0, 1), "rotational"), ((1, 1), "rotational")])
def test_what_is_made_of_several_disks_is_as_the_slowest(
    system: System, file: Path, number: str, turning: tuple[int, int], kind: str
) -> None:
    # An encrypted volume on an array: neither has a mind of its own.
    disks = [system.disk(f"pci0000:00/ata{at}/block/sd{at}", f"8:{at}", turns) for at, turns in enumerate(turning)]
    array = system.disk("virtual/block/md0", "9:0", 0)
    volume = system.disk("virtual/block/dm-0", number, 0)
    system.made_of(array, *disks)
    system.made_of(volume, array)
    system.mount("xfs", "/dev/mapper/models", number)
    assert storage_of(file).kind == kind


@linux
def test_a_device_that_is_made_of_itself_is_no_endless_loop(system: System, file: Path, number: str) -> None:
    volume = system.disk("virtual/block/dm-0", number, 1)
    system.made_of(volume, volume)
    system.mount("xfs", "/dev/dm-0", number)
    assert storage_of(file).kind == "local"


@linux
@pytest.mark.parametrize(("name", "kind"), [("rbd0", "network"), ("nbd3", "network"), ("pmem0", "memory")])
def test_disks_on_a_network_and_in_memory_are_told_by_their_names(
    system: System, file: Path, number: str, name: str, kind: str
) -> None:
    system.disk(f"virtual/block/{name}", number, 0)
    system.mount("ext4", f"/dev/{name}", number)
    assert storage_of(file).kind == kind


@linux
def test_an_image_is_as_the_file_that_it_is(system: System, tmp_path: Path, file: Path, number: str) -> None:
    image = tmp_path / "image.squashfs"
    image.touch()
    system.disk("virtual/block/loop0", "7:0", 1, loop__backing_file=str(image))
    system.mount("squashfs", "/dev/loop0", "7:0", point=str(file))
    system.mount("lustre", "server:/scratch", "0:32", point=str(image))
    assert storage_of(file).kind == "network"
    assert "image.squashfs" in storage_of(file).why


# ------------------------------------------------------------------ habits


class Remote(ByteSource):
    name = "https://example.org/weights"
    size = 1000
    identity = None

    def read_into(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(habits, "usable_processors", lambda: count)


@linux
@pytest.mark.parametrize(("filesystem", "expected"), [("tmpfs", (2, 16)), ("zfs", (2, 4)), ("nfs4", (16, 16))])
def test_threads_go_by_the_storage_and_the_processors(
    system: System,
    file: Path,
    number: str,
    processors: Callable[[int], None],
    filesystem: str,
    expected: tuple[int, int],
) -> None:
    system.mount(filesystem, "source", number)
    for count, threads in zip((2, 64), expected, strict=True):
        processors(count)
        assert habits_of([FileSource(file)]).threads == threads


@linux
def test_past_the_page_cache_more_readers_wait_for_a_disk_than_there_are_processors(
    system: System, file: Path, number: str, processors: Callable[[int], None]
) -> None:
    processors(1)
    system.mount("zfs", "tank", number)
    assert habits_of([FileSource(file)], past_page_cache=True).threads == 4
    assert habits_of([FileSource(file)], "rotational", past_page_cache=True).threads == 1


@linux
def test_a_disk_that_turns_has_one_reader(
    system: System, file: Path, number: str, processors: Callable[[int], None]
) -> None:
    processors(64)
    system.disk("pci0000:00/ata1/host0/block/sda", number, 1)
    system.mount("ext4", "/dev/sda", number)
    found = habits_of([FileSource(file)])
    assert (found.kind, found.threads) == ("rotational", 1)


def test_the_kind_that_most_bytes_lie_on_decides(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(10))
    large.write_bytes(bytes(5000))
    here = storage_of(large).kind
    assert habits_of([Remote(), FileSource(small)]).kind == "network"
    assert habits_of([Remote(), FileSource(large)]).kind == here


def test_nothing_to_read_is_no_error() -> None:
    assert habits_of([]).threads >= 1


def test_the_environment_overrides_what_the_system_says(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "Network")
    assert habits_of([FileSource(file)]).kind == "network"


def test_what_is_asked_for_overrides_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "network")
    assert habits_of([FileSource(file)], "rotational").kind == "rotational"


def test_an_unknown_kind_in_the_environment_is_named_with_those_there_are(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLOADERS_STORAGE", "floppy")
    with pytest.raises(ConfigError, match=r"floppy.*(?s:.)*local, rotational, network, memory"):
        habits_of([FileSource(file)])


@linux
def test_mounts_are_looked_up_once_for_the_files_of_one_device(
    system: System, file: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.mount("tmpfs", "tmpfs", number)
    asked = []
    monkeypatch.setattr(habits, "storage_of", lambda path: asked.append(path) or storage_of(path))
    other = file.with_name("other.bin")
    other.write_bytes(b"y")
    habits_of([FileSource(file), FileSource(other)])
    assert len(asked) == 1
