"""Pictures as files, honest ones and others."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

DRAWN = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8))


def encoded(picture: Image.Image = DRAWN, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_claiming(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def jpeg_claiming(width: int, height: int) -> bytes:
    whole = encoded(kind="JPEG")
    place = whole.index(b"\xff\xc0") + 5
    return whole[:place] + struct.pack(">HH", height, width) + whole[place + 4 :]
