"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

from sphinx.util.typing import stringify_annotation

import weightloaders

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "weightloaders"
author = "The weightloaders developers"
copyright = author  # noqa: A001 -- Sphinx's name for it
release = version = weightloaders.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"weightloaders {release}"
html_copy_source = False

# ------------------------------------------------------------------ pages

myst_enable_extensions = ["colon_fence"]
# Headings get anchors, so that pages link to sections in the way that code hosts understand too.
myst_heading_anchors = 3

# ------------------------------------------------------------------ docstrings

# Docstrings name things in single backticks: each becomes a link, and one that leads nowhere is an error.
default_role = "py:obj"
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 88

nitpicky = True
# What other projects document can't be linked to: nothing is fetched while the documentation is built.
nitpick_ignore_regex = [
    (r"py:(class|obj)", r"(torch|nn|pydantic|pathlib|collections\.abc|re|threading)\..*"),
    # A field that is nobody's business.
    (r"py:class", r"weightloaders\.mapping\.patterns\.Pattern"),
    (r"py:class", r"Tensor|BaseModel|Path|Hashable|NoneType|AbstractContextManager|[TR]"),
]


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", _resolve_by_last_name)
    app.connect("autodoc-process-signature", _fields_as_signature)


def _resolve_by_last_name(app: Sphinx, env: BuildEnvironment, node: Element, shown: Element) -> Element | None:
    """A class is documented once, under the name that users import; docstrings elsewhere call it by its last name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    target = node["reftarget"]
    if target.startswith("weightloaders."):
        target = target.rpartition(".")[2]
    found = {entry.node_id: name for name, entry in domain.objects.items() if name.endswith(f".{target}")}
    if len(found) != 1:
        return None
    [name] = found.values()
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, shown)


def _fields_as_signature(_app: Sphinx, what: str, _name: str, value: Any, *_: Any) -> tuple[str, None] | None:
    """For a pydantic model its fields, without the constraints that only pydantic reads."""
    fields = getattr(value, "model_fields", None)
    if what != "class" or not fields:
        return None
    hints = typing.get_type_hints(value)
    shown = [
        f"{name}: {stringify_annotation(hints[name], 'smart')}"
        + ("" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}")
        for name, field in fields.items()
    ]
    return f"(*, {', '.join(shown)})", None
