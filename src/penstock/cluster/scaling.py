"""Scaler: how many replicas there should be, from the requests that are open."""

from dataclasses import dataclass, field

from penstock.core.errors import ConfigError


@dataclass
class Scaler:
    """Bounds, and how long a load must last before a replica is started or stopped.

    Serve's own autoscaler counts within an application, and here each replica is one. The delays
    are Serve's defaults.
    """

    least: int
    most: int
    together: int
    """Requests that a replica runs together."""
    busy_s: float = 30.0
    idle_s: float = 600.0
    _since: dict[int, float] = field(default_factory=dict)
    """When each number of replicas began to be wanted."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most or self.together < 1:
            raise ConfigError(
                f"{self.least} to {self.most} replicas make no sense: give --max-replicas at least "
                "--replicas"
            )

    def wanted(self, running: int, open_requests: int, now_s: float) -> int:
        """How many there should be: `running`, or one more or fewer.

        One more where all are full; one fewer where the others would be half full at most.
        """
        number, delay_s = running, 0.0
        if open_requests >= running * self.together:
            number, delay_s = running + 1, self.busy_s
        elif 2 * open_requests <= (running - 1) * self.together:
            number, delay_s = running - 1, self.idle_s
        number = min(max(number, self.least), self.most)
        self._since = {number: self._since.get(number, now_s)}
        if number == running or now_s - self._since[number] < delay_s:
            return running
        self._since = {}
        return number
