"""``weightloaders plan SRC --tree``: the model's modules, and how each is filled; layers that are alike in one line."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightloaders.cli.common import counted, printable, results

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rich.tree import Tree

    from weightloaders.cli.plan_ways import Way

# Wider than any line: what is not read on a terminal is not folded.
_UNFOLDED = 10_000


@dataclass(slots=True)
class _Branch:
    """A module: its parameters, and the modules in it."""

    ways: dict[str, Way] = field(default_factory=dict)
    modules: dict[str, _Branch] = field(default_factory=dict)

    @property
    def all_ways(self) -> Iterator[Way]:
        yield from self.ways.values()
        for module in self.modules.values():
            yield from module.all_ways

    @property
    def likeness(self) -> Any:
        """What is equal for modules that are alike."""
        return (
            [(name, w.target.shape, w.target.dtype, w.how) for name, w in self.ways.items()],
            [(name, module.likeness) for name, module in self.modules.items()],
        )


def say_tree(ways: Mapping[str, Way], title: str) -> None:
    """Print the tree: folded to its width on a terminal, unfolded elsewhere."""
    from rich.console import Console
    from rich.tree import Tree

    root = _Branch()
    for name, way in ways.items():
        branch = root
        *path, leaf = name.split(".")
        for segment in path:
            branch = branch.modules.setdefault(segment, _Branch())
        branch.ways[leaf] = way
    tree = Tree(_printable(f"{title}  {_summary(root)}"))
    _grow(tree, root)
    console = Console(
        file=results(), markup=False, emoji=False, highlight=False, width=None if results().isatty() else _UNFOLDED
    )
    with console.capture() as captured:
        console.print(tree)
    results().write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _printable(text: str) -> str:
    return printable(text).replace("\n", " ")


def _grow(tree: Tree, branch: _Branch) -> None:
    for name, way in branch.ways.items():
        tree.add(_printable(f"{name}  {_described(way)}"))
    for label, alike in _labelled("", branch.modules):
        module = alike[0]
        if len(alike) == len(module.ways) == 1 and not module.modules:
            (name, way), *_ = module.ways.items()
            tree.add(_printable(f"{label}.{name}  {_described(way)}"))
        else:
            _grow(tree.add(_printable(f"{label}  {_summary(*alike)}")), module)


def _described(way: Way) -> str:
    return f"{str(way.target.dtype).removeprefix('torch.')} {list(way.target.shape)}, {way.how}"


def _labelled(prefix: str, modules: Mapping[str, _Branch]) -> Iterator[tuple[str, list[_Branch]]]:
    """Modules, or runs of numbered ones that are alike, each with what it is called."""
    for _, run in itertools.groupby(modules.items(), key=_run_key):
        (first, branch), *rest = run
        label = prefix + (f"{first} ... {rest[-1][0]}" if rest else first)
        if not rest and not branch.ways and branch.modules and all(map(str.isdecimal, branch.modules)):
            # A list of layers: its name goes with theirs.
            yield from _labelled(f"{label}.", branch.modules)
        else:
            yield label, [branch, *(other for _, other in rest)]


def _run_key(item: tuple[str, _Branch]) -> Any:
    name, branch = item
    return branch.likeness if name.isdecimal() else name


def _summary(*alike: _Branch) -> str:
    ways = list(alike[0].all_ways)
    times = f"{len(alike):,} times " if len(alike) > 1 else ""
    nbytes = sum(way.nbytes for branch in alike for way in branch.all_ways)
    return f"{times}{counted(len(ways), 'parameter')}, {counted(nbytes, 'byte')}, {_hows(ways)}"


def _hows(ways: Iterable[Way]) -> str:
    return ", ".join(dict.fromkeys(way.how for way in ways)) or "nothing"
