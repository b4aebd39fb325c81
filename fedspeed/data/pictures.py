"""Decode one picture; used by every loader that meets picture files."""

from __future__ import annotations

import io

import numpy as np

from ..errors import UserError


def decode(blob: bytes, where: str, size: tuple[int, int] | None = None, mode: str = "RGB") -> np.ndarray:
    """A picture as bytes (channels, height, width); the error names the file."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(blob)) as picture:
            whole = picture.convert(mode)
            if size is not None and whole.size != size:
                whole = whole.resize(size, Image.Resampling.BILINEAR)
            pixels = np.asarray(whole)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"data: cannot decode the picture {where} ({error}); replace or remove it") from error
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]
