"""Checks that labels of a figure lie inside it and do not overlap."""

import itertools
from collections.abc import Callable

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


@pytest.fixture
def check_texts() -> Callable[[Figure], None]:
    def check(figure: Figure) -> None:
        FigureCanvasAgg(figure).draw()
        # Ticks beyond the limits of an axis are never drawn.
        drawn = {
            text: text.get_window_extent()
            for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip() and is_drawn(text)
        }
        page = figure.bbox
        for text, box in drawn.items():
            assert box.x0 >= page.x0 - 1 and box.x1 <= page.x1 + 1, text
            assert box.y0 >= page.y0 - 1 and box.y1 <= page.y1 + 1, text
        for (one, box), (other, place) in itertools.combinations(drawn.items(), 2):
            width = min(box.x1, place.x1) - max(box.x0, place.x0)
            height = min(box.y1, place.y1) - max(box.y0, place.y0)
            assert width < 1 or height < 1, (one, other)

    def is_drawn(text: Text) -> bool:
        hidden = set()
        for ax in text.get_figure(root=True).get_axes():
            for axis in (ax.xaxis, ax.yaxis):
                low, high = sorted(axis.get_view_interval())
                for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                    inside = low <= tick.get_loc() <= high and ax.axison
                    labels = (tick.label1, tick.label2)
                    hidden |= {
                        label
                        for label in labels
                        if not (inside and label.get_visible() and tick.get_visible())
                    }
        return text not in hidden

    return check
