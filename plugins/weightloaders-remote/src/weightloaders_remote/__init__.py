"""Checkpoints in object storage and on web servers for weightloaders."""

from weightloaders_remote.loader import RemoteLoader as RemoteLoader
