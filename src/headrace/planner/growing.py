"""Pages that rows need beyond what they reserved: one every `page_size` steps each, counted and charged by the span.

Owns which rows do, by the step in which they need their first one, modulo `page_size`; knows no requests' other pages.
"""

from headrace.planner.pages import Pages


class Growing:
    """From step `charged` on, pages are still to be taken."""

    def __init__(self, pages: Pages, charged: int) -> None:
        self.charged = charged
        self.num_rows = 0
        self._pages = pages
        self._page_size = pages.page_size
        self._by_step = [0] * pages.page_size

    def add(self, needs_from: int) -> None:
        """A row needs one in this step, and every `page_size` steps from then on."""
        self._by_step[needs_from % self._page_size] += 1
        self.num_rows += 1

    def remove(self, needs_from: int) -> None:
        self._by_step[needs_from % self._page_size] -= 1
        self.num_rows -= 1

    def num_needed(self, num_steps: int) -> int:
        """In so many steps."""
        if not self.num_rows:
            return 0
        rounds, rest = divmod(num_steps, self._page_size)
        first = self.charged
        return rounds * self.num_rows + sum(self._by_step[(first + nth) % self._page_size] for nth in range(rest))

    def num_taken(self, needs_from: int) -> int:
        """By such a row."""
        return max(0, (self.charged - 1 - needs_from) // self._page_size + 1)

    def charge(self, step: int) -> None:
        """Take those of all steps before this one."""
        num_pages = self.num_needed(step - self.charged)
        if num_pages:
            self._pages.take(num_pages)
        self.charged = step
