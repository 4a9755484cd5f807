"""What the documentation tests need of Markdown: fenced blocks and links."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

FENCED = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


class Block(NamedTuple):
    line: int  # of its first line of text, from 1
    text: str


def blocks(markdown: str, info: str) -> list[Block]:
    """The fenced blocks whose info string is exactly `info`."""
    return [
        Block(markdown.count("\n", 0, match.start("text")) + 1, textwrap.dedent(match["text"]))
        for match in FENCED.finditer(markdown)
        if match["info"].strip() == info
    ]


def local_links(markdown: str) -> list[str]:
    """Targets of links that stay in the repository, without their fragments."""
    prose = FENCED.sub("", markdown)
    targets = (match["target"].split("#")[0] for match in LINK.finditer(prose))
    return [target for target in targets if target and "://" not in target]
