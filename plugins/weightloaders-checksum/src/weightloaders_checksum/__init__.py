"""The files of every load held against known checksums."""

from weightloaders_checksum.settings import configure as configure
