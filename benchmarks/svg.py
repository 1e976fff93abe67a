"""Small charts as SVG: lines, of what sizes or time cost, and bars, of how many times as fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 640
_HEIGHT: Final = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 170, 40, 48
_COLOURS: Final = ("#2563eb", "#b45309", "#059669", "#7c3aed", "#dc2626", "#0891b2")


@dataclass
class Series:
    """One line: (x, y) pairs, ascending in x."""

    name: str
    points: list[tuple[float, float]]


def chart(
    title: str, x_label: str, y_label: str, series: list[Series], *, logarithmic: bool = True
) -> str:
    """The chart as a document.

    Args:
        title: above it.
        x_label: what x is.
        y_label: what y is, with its unit.
        series: the lines; x above 0 on a logarithmic axis.
        logarithmic: a mark for each x, tenfold steps alike; else evenly, from 0.
    """
    return "\n".join(_elements(title, x_label, y_label, series, logarithmic)) + "\n"


def bars(title: str, rows: list[tuple[str, dict[str, float]]]) -> str:
    """A chart of bars from a line at 1: to the right for more, to the left for less.

    Args:
        title: above it.
        rows: what was measured, and by the name of who is compared how many times as fast.
    """
    names = list(dict.fromkeys(name for _, found in rows for name in found))
    most = max(abs(math.log2(ratio)) for _, found in rows for ratio in found.values())
    steps = max(1, math.ceil(most))
    left, right, thick = 170, _WIDTH - 60, 11
    middle, each = (left + right) / 2, (right - left) / 2 / steps
    height = _TOP + len(rows) * (thick * len(names) + 8) + 30 + 18 * len(names)
    parts = [_head(title, height)]
    bottom = height - 24 - 18 * len(names)
    for step in range(-steps, steps + 1):
        x, colour = middle + step * each, "#ddd" if step else "#333"
        parts.append(f'<path d="M{x:.1f} {_TOP - 6}V{bottom}" stroke="{colour}"/>')
        text = f"{2**step:g}x" if step >= 0 else f"1/{2**-step:g}"
        parts.append(_text(x, bottom + 14, text, anchor="middle"))
    y = _TOP
    for what, found in rows:
        parts.append(_text(left - 8, y + thick * len(names) / 2 + 4, what, anchor="end"))
        for number, name in enumerate(names):
            if name in found:
                length = math.log2(found[name]) * each
                x = middle + min(length, 0)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{abs(length):.1f}" height="{thick - 2}"'
                    f' fill="{_COLOURS[number]}"/>'
                )
                parts.append(_text(right + 8, y + thick - 2, f"{found[name]:.2f}", size=10))
            y += thick
        y += 8
    for number, name in enumerate(names):
        parts.append(_text(left, bottom + 34 + 18 * number, name, colour=_COLOURS[number]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(title: str, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}"'
        ' font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{height:g}" fill="white"/>\n'
        + _text(_LEFT, 22, title, size=14)
    )


def _elements(
    title: str, x_label: str, y_label: str, series: list[Series], logarithmic: bool
) -> Iterator[str]:
    xs = sorted({x for one in series for x, _ in one.points})
    scale: Callable[[float], float] = math.log10 if logarithmic else float
    marks = xs if logarithmic else [_round_up(xs[-1]) * step / 4 for step in range(5)]
    top = _round_up(max(y for one in series for _, y in one.points))
    low, high = scale(marks[0]), scale(marks[-1])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(x: float) -> float:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (right - _LEFT)

    def up(y: float) -> float:
        return bottom - y / top * (bottom - _TOP)

    yield _head(title, _HEIGHT)
    for step in range(5):
        y = top * step / 4
        yield f'<path d="M{_LEFT} {up(y):.1f}H{right}" stroke="#ddd"/>'
        yield _text(_LEFT - 6, up(y) + 4, f"{y:g}", anchor="end")
    for x in marks:
        yield _text(across(x), bottom + 18, _short(x), anchor="middle")
    yield _text((_LEFT + right) / 2, _HEIGHT - 10, x_label, anchor="middle")
    yield _text(8, _TOP - 6, y_label)
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [(across(x), up(y)) for x, y in one.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in places:
            if len(places) <= 20:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        yield _text(right + 12, _TOP + 16 + 18 * number, one.name, colour=colour)
    yield "</svg>"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#333"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="{colour}">{escape(text)}</text>'
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, which four steps divide well."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def _short(value: float) -> str:
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " K")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
