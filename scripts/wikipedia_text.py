"""Makes a folder of 105 English Wikipedia articles as plain text, for `allstep train text`.

    pip download gensim==4.4.0 --no-deps
    python scripts/wikipedia_text.py gensim-4.4.0-*.whl texts
    allstep train text --folder texts

The articles (CC-BY-SA) are among the test data in the package's wheel; nothing is installed.
"""

import argparse
import bz2
import html
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

MARKUP = [  # innermost first; each is repeated until nothing changes
    (r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>|<gallery.*?</gallery>", ""),
    (r"\{\{[^{}]*\}\}|\{\|((?!\{\|).)*?\|\}", ""),
    (r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", ""),
    (r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1"),
    (r"\[https?://\S+ ?([^\]]*)\]", r"\1"),
    (r"<[^<>]*>|'{2,}|^[ \t]*[*#:;|!]+|^==+[^=\n]*==+[ \t]*$", ""),
    (r"\n\s*\n\s*\n", "\n\n"),
]


def plain(wikitext: str) -> str:
    """The text without its markup."""
    text = html.unescape(wikitext)
    for pattern, replacement in MARKUP:
        before = None
        while before != text:
            before = text
            text = re.sub(pattern, replacement, text, flags=re.DOTALL | re.MULTILINE)
    return html.unescape(text).strip()


def articles(wheel: Path) -> Iterator[str]:
    """The wikitext of each page that is not a redirection."""
    with zipfile.ZipFile(wheel) as files:
        name = next(n for n in files.namelist() if "enwiki" in n and "shortened" in n)
        root = ElementTree.fromstring(bz2.decompress(files.read(name)))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("}text")]
    return (text for text in texts if not text.lstrip().lower().startswith("#redirect"))


parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
parser.add_argument("wheel", type=Path)
parser.add_argument("folder", type=Path)
arguments = parser.parse_args()
arguments.folder.mkdir(parents=True, exist_ok=True)
for index, wikitext in enumerate(articles(arguments.wheel)):
    (arguments.folder / f"{index:03}.txt").write_text(plain(wikitext), encoding="utf-8")
