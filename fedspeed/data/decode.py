"""Decode one picture; used by every loader that meets picture files."""

from __future__ import annotations

import io
import warnings

import numpy as np

from ..errors import UserError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
"""What is recognised, whatever a file is called. Pillow would also start Ghostscript for a file that is PostScript."""
MOST = 2**26
"""Pixels of a picture, at most; a few kilobytes can unpack to gigabytes."""


class Unreadable(Exception):
    """Not a picture, a damaged one, or one that is too large."""


def pixels(blob: bytes, mode: str = "RGB", size: tuple[int, int] | None = None) -> np.ndarray:
    """A picture as bytes (height, width, channels), or (height, width) if grey; raises `Unreadable`."""
    from PIL import Image

    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own limit of size, and of harmless damage
            with Image.open(io.BytesIO(blob), formats=[name for name in FORMATS if name in Image.OPEN]) as picture:
                if picture.width * picture.height > MOST:
                    raise Unreadable(f"{picture.width} x {picture.height} pixels, expected at most {MOST}")
                whole = picture.convert(mode)
            if size is not None and whole.size != size:
                whole = whole.resize(size, Image.Resampling.BILINEAR)
            return np.asarray(whole)
    except Unreadable:
        raise
    except Exception as error:  # damaged files raise nearly anything
        raise Unreadable(str(error) or type(error).__name__) from error


def decode(blob: bytes, where: str, size: tuple[int, int] | None = None, mode: str = "RGB") -> np.ndarray:
    """A picture as bytes (channels, height, width); the error names the file."""
    try:
        found = pixels(blob, mode, size)
    except Unreadable as error:
        raise UserError(f"data: cannot decode the picture {where} ({error}); replace or remove it") from error
    return found.transpose(2, 0, 1) if found.ndim == 3 else found[None]
