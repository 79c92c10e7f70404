"""What a file lies on: a disk without or with turning parts, a network, memory.

On Linux the mount is looked up in ``/proc/self/mountinfo`` (proc(5)) and the disk in ``/sys/dev/block`` (sysfs-block in
the kernel's ABI documentation): both are answered by the kernel alone, where asking the file system itself (``statfs``)
would wait for a server that has gone away.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["local", "rotational", "network", "memory"]

_MOUNTINFO = Path("/proc/self/mountinfo")
_SYS = Path("/sys")
# Names as mountinfo has them. FUSE is told apart by its prefix, and by `fuseblk` where it has a disk below it.
_NETWORK = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "fuse", "glusterfs", "gpfs", "lustre",
        "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs",
        "wekafs",
    }
)  # fmt: skip
_MEMORY = frozenset({"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"})
_REMOTE_DISK = re.compile(r"(nbd|rbd|drbd)\d")
_MEMORY_DISK = re.compile(r"(ram|pmem|zram)\d")
# Virtual disks, by their place among the devices (virtio, Xen, Hyper-V), or by a word of their vendor or model.
_VIRTUAL_DEVICE = re.compile(r"/(virtio\d|vbd-|VMBUS:)", re.IGNORECASE)
_VIRTUAL_VENDORS = frozenset({"amazon", "google", "msft", "qemu", "vbox", "vmware"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Storage:
    """What a file lies on.

    Attributes:
        kind: ``local`` (a disk without turning parts, and all that nothing else is known of), ``rotational``,
            ``network`` (every read is a trip to somewhere), ``memory``.
        why: How that is known, as text.
        filesystem: Its name in the system's words, e.g. ``ext4``; empty where it is not known.
        device: What was mounted, e.g. ``/dev/sda1`` or ``server:/models``; empty where it is not known.
    """

    kind: Kind
    why: str
    filesystem: str = ""
    device: str = ""


def storage_of(path: str | Path) -> Storage:
    """What a file lies on, as far as the system tells without being asked for more than it has at hand.

    Args:
        path: A file or folder. One that can't be looked at counts as ``local``.
    """
    ask = {"linux": _on_linux, "win32": _on_windows}.get(sys.platform)
    if ask is None:
        return Storage("local", f"not looked up on {sys.platform}")
    try:
        return ask(Path(path))
    except (OSError, ValueError) as error:
        return Storage("local", f"the system does not say: {error}")


# ------------------------------------------------------------------ Linux


class Mount(NamedTuple):
    """A line of mountinfo: the device as ``major:minor`` and as `os.stat` has it, where it is mounted, type, source."""

    number: str
    device: int
    point: str
    filesystem: str
    source: str


def mounts() -> list[Mount]:
    """What is mounted, in the order of mounting; empty where the system has no mountinfo."""
    try:
        lines = _MOUNTINFO.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
    return [mount for line in lines if (mount := _mount(line)) is not None]


def _mount(line: str) -> Mount | None:
    # 36 35 98:0 /root /mnt rw,noatime master:1 - ext3 /dev/root rw
    before, _, after = line.partition(" - ")
    head, tail = before.split(" "), after.split(" ")
    if len(head) < 6 or len(tail) < 2:
        return None
    major, _, minor = head[2].partition(":")
    device = os.makedev(int(major), int(minor)) if hasattr(os, "makedev") else 0
    return Mount(head[2], device, _plain(head[4]), tail[0], _plain(tail[1]))


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)


def _on_linux(path: Path) -> Storage:
    mount = _mount_of(path)
    if mount is None:
        return Storage("local", "it is not known what is mounted there")
    name, source = mount.filesystem, mount.source
    if name in _MEMORY:
        return Storage("memory", f"{name} is memory", name, source)
    if name in _NETWORK or name.startswith("fuse."):
        through = "every read goes through another process, and mostly to a network" if "fuse" in name else "a network"
        return Storage("network", f"{name}: {through}", name, source)
    return _of_disks(mount)


def _mount_of(path: Path) -> Mount | None:
    device = path.stat().st_dev
    known = mounts()
    for mount in known:
        if mount.device == device:
            return mount
    # btrfs gives each subvolume a number of its own, overlayfs sometimes each layer: then the place decides. Of what is
    # mounted over one place, the last is seen.
    place = os.path.realpath(path)
    above = [m for m in known if m.point == "/" or place == m.point or place.startswith(m.point + "/")]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def _of_disks(mount: Mount) -> Storage:
    found = [_of_disk(disk) for disk in _disks(_sysfs(mount))] or [Storage("local", "no disk of its own is known")]
    # One that is slow to reach, or has to turn, is felt whatever the others are.
    felt = next((storage for storage in found if storage.kind in ("network", "rotational")), found[0])
    return replace(felt, filesystem=mount.filesystem, device=mount.source)


def _of_disk(disk: Path) -> Storage:
    name = disk.name
    image = _text(disk / "loop/backing_file")
    if image:
        below = storage_of(image)
        return replace(below, why=f"{name} is the file {image}, and {below.why}")
    if _REMOTE_DISK.match(name):
        return Storage("network", f"{name} is a disk on a network")
    if _MEMORY_DISK.match(name):
        return Storage("memory", f"{name} is memory")
    if _text(disk / "queue/rotational") != "1":
        return Storage("local", f"{name} has no turning parts")
    if _is_virtual(disk):
        return Storage("local", f"{name} says that it turns, as virtual disks do whatever lies below them")
    return Storage("rotational", f"{name} has turning parts")


def _sysfs(mount: Mount) -> Path | None:
    """The folder that describes what was mounted; also for file systems with numbers of their own."""
    folder = _SYS / "dev/block" / mount.number
    if not folder.exists() and mount.source.startswith("/dev/"):
        folder = _SYS / "class/block" / Path(os.path.realpath(mount.source)).name
    return folder.resolve() if folder.exists() else None


def _disks(device: Path | None, depth: int = 8) -> Iterator[Path]:
    """The disks below a device: of a partition its disk, of a mapped, joined or encrypted one those it is made of."""
    if device is None or depth == 0:
        return
    if (device / "partition").exists():
        device = device.parent
    below = sorted((device / "slaves").glob("*"))
    for slave in below:
        yield from _disks(slave.resolve(), depth - 1)
    if not below:
        yield device


def _is_virtual(disk: Path) -> bool:
    words = f"{_text(disk / 'device/vendor')} {_text(disk / 'device/model')}".lower().replace(",", " ").split()
    return _VIRTUAL_DEVICE.search(str(disk)) is not None or not _VIRTUAL_VENDORS.isdisjoint(words)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "surrogateescape").strip()
    except OSError:
        return ""


# ------------------------------------------------------------------ Windows


def _on_windows(path: Path) -> Storage:
    drive = path.absolute().drive
    if drive.startswith("\\\\"):
        return Storage("network", f"{drive} is a share")
    if sys.platform == "win32":
        import ctypes

        # https://learn.microsoft.com/windows/win32/api/fileapi/nf-fileapi-getdrivetypew: 4 is remote, 6 a RAM disk.
        kind = ctypes.windll.kernel32.GetDriveTypeW(f"{drive}\\")
        if kind == 4:
            return Storage("network", f"{drive} is a network drive")
        if kind == 6:
            return Storage("memory", f"{drive} is a RAM disk")
    return Storage("local", f"{drive} is a local drive")
