"""What an error advises, in the words of the command line: the library advises callers in Python."""

from __future__ import annotations

import ast
import json
import re

_POLICY = re.compile(r"\bon_(missing|unexpected|mismatch)=(?:\{('[^']*'): '(\w+)'\}|'(\w+)')")
_RENAME = re.compile(r"\brules=\[Rename\(('[^']*'), ('[^']*')\)\]")
_DROP = re.compile(r"\brules=\[Drop\(('[^']*')\)\]")
_PATTERNS = r"'[^']*'|\[[^\]]*\]"
_CONVERT = re.compile(
    rf"Convert\(({_PATTERNS}), ({_PATTERNS}), ('\w+')((?:, \w+=(?:\d+|\[[\d, ]*\]|\.\.\.))*)\)(?:, )?"
)
_CONVERTS = re.compile(r"\brules=\[((?:Convert\([^()]*\)(?:, )?)+)\]")
# Options of loaders that are advised by name.
_OPTION = re.compile(
    r"\b(file_pattern|ignore_index|include_unindexed|key|max_header_bytes|meta_file|variant)=('[^']*'|\w+)"
)
_PLAIN = {
    "config=<folder or config object>": "--model DIR",
    "trust_remote_code=True": "--trust-remote-code",
}


def for_command_line(text: str) -> str:
    """The same advice with options in the place of arguments."""
    text = _POLICY.sub(_policy, text)
    text = _RENAME.sub(lambda m: f"--rules FILE, with this in the file: rename: {{{_yaml(m[1])}: {_yaml(m[2])}}}", text)
    text = _DROP.sub(lambda m: f"--rules FILE, with this in the file: drop: [{_yaml(m[1])}]", text)
    text = _CONVERTS.sub(_conversions, text)
    text = _OPTION.sub(lambda m: f"--option {m[1]}={m[2].lower() if m[2] == 'True' else m[2]}", text)
    for said, option in _PLAIN.items():
        text = text.replace(said, option)
    return text


def _policy(match: re.Match[str]) -> str:
    option, name, decision, for_all = match.groups()
    return f"--on-{option} {for_all}" if for_all else f"--on-{option} {ast.literal_eval(name)}={decision}"


def _conversions(match: re.Match[str]) -> str:
    # What is left once all that can be said in YAML is taken away, e.g. a function of one's own.
    if _CONVERT.sub("", match[1]):
        return match[0]
    return f"--rules FILE, with this in the file: convert: [{', '.join(map(_conversion, _CONVERT.finditer(match[1])))}]"


def _conversion(match: re.Match[str]) -> str:
    source, target, function, sizes = match.groups()
    fields = f"sources: {_yaml(source)}, targets: {_yaml(target)}, function: {ast.literal_eval(function)}"
    return f"{{{fields}{sizes.replace('=', ': ')}}}"


def _yaml(quoted: str) -> str:
    return json.dumps(ast.literal_eval(quoted))
