"""Loads and saves while the disk, the system or somebody else fails: ``python -m faults``.

A library that is preloaded (``shim.c``) makes system calls fail at moments chosen by a seed. What follows must be a
right result or an error of ours, promptly, with the model's state told truly and the files on disk old or new; anything
else is lost, and is told with the seed that brings it back.
"""
