"""Pictures as files: what is read, and what is refused with its reason."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictured import DRAWN, chunk, encoded, jpeg_claiming, png_claiming
from PIL import Image

from grpo.wire import picture_files
from grpo.wire.picture_files import PictureError, check_picture, open_picture


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_a_png_of_any_mode_is_opened_as_rgb(mode):
    data = encoded(DRAWN.convert("L").convert(mode) if mode == "I;16" else DRAWN.convert(mode))
    assert check_picture(data) == (8, 6)
    picture = open_picture(data)
    assert (picture.mode, picture.size) == ("RGB", (8, 6))
    if mode in ("RGB", "RGBA"):
        assert np.array_equal(picture, DRAWN)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_is_opened_as_rgb(mode):
    data = encoded(DRAWN.convert(mode), "JPEG")
    assert check_picture(data) == (8, 6) and open_picture(data).mode == "RGB"


def test_a_jpeg_of_one_colour_has_few_bytes_and_is_taken():
    flat = encoded(Image.new("L", (2048, 2048)), "JPEG", progressive=True, optimize=True)
    assert len(flat) < 2048 * 2048 / 200 and check_picture(flat) == (2048, 2048)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_picture_is_turned_as_the_camera_was_held(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = open_picture(encoded(DRAWN, kind, exif=exif))
    assert picture.size == (6, 8)
    if kind == "PNG":
        assert np.array_equal(picture, np.rot90(np.asarray(DRAWN), -1))


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "is no PNG or JPEG file"),
        (b"<svg/>", "is no PNG or JPEG file"),
        (encoded(kind="GIF"), "is no PNG or JPEG file"),
        (encoded(kind="WEBP"), "is no PNG or JPEG file"),
        (encoded(kind="BMP"), "is no PNG or JPEG file"),
        (encoded(save_all=True, append_images=[DRAWN.rotate(180)]), "is animated"),
        (encoded()[:8], "is damaged"),
        (encoded()[:30], "is damaged"),
        (encoded(kind="JPEG")[:20], "is damaged"),
        (png_claiming(0, 5), "is damaged"),
        (jpeg_claiming(4096, 4096), r"is damaged \(it has \d+ bytes for 4096 x 4096 pixels\)"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_header(data, reason):
    for read in (check_picture, open_picture):
        with pytest.raises(PictureError, match=reason) as refused:
            read(data)
        assert not refused.value.is_large


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_whose_end_is_missing_is_damaged(kind):
    whole = encoded(kind=kind)
    with pytest.raises(PictureError, match=r"is damaged \(.+\)"):
        open_picture(whole[: -len(whole) // 8])


@pytest.mark.parametrize("bomb", [png_claiming(100_000, 100_000), jpeg_claiming(60_000, 60_000)], ids=["PNG", "JPEG"])
def test_a_bomb_is_refused_before_it_is_decoded(bomb):
    for read in (check_picture, open_picture):
        tracemalloc.start()
        with pytest.raises(PictureError, match=r"has (100000 x 100000|60000 x 60000) pixels: the limit is") as refused:
            read(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 and refused.value.is_large
        tracemalloc.stop()


PNG, JPEG = encoded(), encoded(kind="JPEG")


@pytest.mark.parametrize(
    "data",
    [
        PNG[:33] + chunk(b"abCd", b"") * 100_000 + PNG[33:],
        PNG[:-12] + chunk(b"abCd", b"") * 100_000 + PNG[-12:],
        JPEG[:20] + b"\xff\xe5\x00\x02" * 100_000 + JPEG[20:],
        JPEG[:20] + b"\xff\xf0" * 200_000 + JPEG[20:],
        JPEG[:20] + bytes(200_000) + JPEG[20:],
    ],
    ids=["before the pixels", "after the pixels", "segments", "markers", "zeros"],
)
def test_a_file_of_countless_parts_is_refused(data):
    """Pillow keeps each with a hundred bytes, and needs a second for a megabyte of zeros between them."""
    with pytest.raises(PictureError, match="is damaged .it consists of too many parts"):
        open_picture(data)


def test_a_jpeg_of_countless_scans_is_refused():
    whole = encoded(kind="JPEG", progressive=True)
    scan = whole[whole.rindex(b"\xff\xda") : -2]
    assert open_picture(whole[:-2] + scan * 50 + whole[-2:]).size == (8, 6)
    with pytest.raises(PictureError, match="too many parts"):
        open_picture(whole[:-2] + scan * 250 + whole[-2:])


def test_a_picture_may_have_as_many_pixels_as_the_limit_and_no_more(monkeypatch):
    for read in (check_picture, open_picture):
        monkeypatch.setattr(picture_files, "MOST_PIXELS", 48)
        read(encoded())
        monkeypatch.setattr(picture_files, "MOST_PIXELS", 47)
        with pytest.raises(PictureError, match="has 8 x 6 pixels: the limit is 47 in all"):
            read(encoded())


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([PNG, JPEG, encoded(DRAWN.convert("P")), encoded(kind="JPEG", progressive=True)]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5),
    st.integers(0, 500),
)
@pytest.mark.filterwarnings("ignore")
def test_damage_is_refused_or_still_a_picture(whole, changes, cut):
    data = bytearray(whole)
    for place, value in changes:
        data[place % len(data)] = value
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(picture_files, "MOST_PIXELS", 1 << 20)
            picture = open_picture(bytes(data[: len(data) - cut]))
    except PictureError as error:
        assert 10 < len(str(error)) < 200
    else:
        assert picture.mode == "RGB"
