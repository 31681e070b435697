"""Text in pictures, in any script that an installed font has."""

from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIZE = 11  # pixels
LINE_HEIGHT = 16  # pixels


def draw_text(
    picture: Image.Image, place: tuple[int, int], text: str, width: int, colour: str = "black"
) -> None:
    """Draw a line of text at `place`, its left upper corner; end it with … after `width` pixels."""
    # No character is narrower than a pixel; an escape has several characters.
    text, font = choose_font(" ".join(text.split())[:width])
    shown = text = text[:width]
    while text and font.getlength(shown) > width:
        text = text[:-1]
        shown = f"{text}…"
    ImageDraw.Draw(picture).text(place, shown, fill=colour, font=font)


def choose_font(text: str) -> tuple[str, ImageFont.FreeTypeFont | ImageFont.ImageFont]:
    """Return a font and `text`, with escapes such as \\u4e03 for characters that no font has."""
    try:
        import matplotlib
    except ImportError:  # Pillow's font may have Latin characters only
        text = text.encode("latin-1", "backslashreplace").decode("latin-1")
        return text, ImageFont.load_default()
    path = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
    if missing := frozenset(text) - _characters(path):
        path = _find_font(frozenset(text)) or path
        missing = missing - _characters(path)
    for character in missing:
        text = text.replace(character, character.encode("unicode_escape").decode())
    return text, ImageFont.truetype(path, SIZE)


@cache
def _find_font(characters: frozenset[str]) -> str:
    """Return the path of an installed font that has all these characters, or an empty string."""
    from matplotlib.font_manager import fontManager

    # matplotlib's Last Resort font has a box for every character.
    fonts = [font for font in fontManager.ttflist if not font.name.startswith("Last Resort")]
    upright_first = sorted(fonts, key=lambda font: (font.style != "normal", font.weight != 400))
    for path in dict.fromkeys(font.fname for font in upright_first):
        with suppress(OSError, RuntimeError):
            if characters <= _characters(path):
                ImageFont.truetype(path, SIZE)  # raises OSError for a font of coloured bitmaps
                return path
    return ""


@lru_cache(maxsize=4)
def _characters(path: str) -> frozenset[str]:
    """Return the characters that a font has."""
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(path).get_charmap()))
