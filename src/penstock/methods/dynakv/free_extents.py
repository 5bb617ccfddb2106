"""FreeExtents: which runs of sectors of a file are free, merged with their neighbours."""

from bisect import bisect_left


class FreeExtents:
    """Allocates runs of sectors in [0, end): the smallest free run that does, else at the end.

    Attributes:
        end: sectors in use or free between used ones; what is free at the end is given up
    """

    def __init__(self) -> None:
        self.end = 0
        self._firsts: list[int] = []  # of the free runs, ascending
        self._sizes: list[int] = []

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first sector, sectors) of each free run, ascending; no two touch."""
        return list(zip(self._firsts, self._sizes, strict=True))

    def take(self, num_sectors: int) -> int:
        """Allocate; returns the first sector."""
        assert num_sectors > 0, num_sectors
        fitting = [(size, i) for i, size in enumerate(self._sizes) if size >= num_sectors]
        if not fitting:
            first, self.end = self.end, self.end + num_sectors
            return first
        size, i = min(fitting)
        first = self._firsts[i]
        if size == num_sectors:
            del self._firsts[i], self._sizes[i]
        else:
            self._firsts[i] += num_sectors
            self._sizes[i] -= num_sectors
        return first

    def give(self, first: int, num_sectors: int) -> None:
        """Free [first, first + num_sectors), all of which was allocated."""
        i = bisect_left(self._firsts, first)
        assert first + num_sectors <= self.end, "sectors beyond the end"
        assert i == len(self._firsts) or first + num_sectors <= self._firsts[i], "freed twice"
        assert i == 0 or self._firsts[i - 1] + self._sizes[i - 1] <= first, "freed twice"
        self._firsts.insert(i, first)
        self._sizes.insert(i, num_sectors)
        for left in (i, i - 1):  # merge with the run behind, then with the one before
            if 0 <= left < len(self._firsts) - 1 and (
                self._firsts[left] + self._sizes[left] == self._firsts[left + 1]
            ):
                self._sizes[left] += self._sizes.pop(left + 1)
                del self._firsts[left + 1]
        if self._firsts and self._firsts[-1] + self._sizes[-1] == self.end:
            self.end = self._firsts.pop()
            self._sizes.pop()
