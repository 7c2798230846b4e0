"""What an engine did, as its recorder saw it, and computation that waits until something else has begun."""

import threading


class Log:
    """Recorded work; `work` gives the names of one lane in the order in which they began."""

    def __init__(self):
        self.rows: list[tuple[str, str, float, float]] = []
        self.lock = threading.Lock()

    def __call__(self, lane: str, name: str, start: float, end: float) -> None:
        with self.lock:
            self.rows.append((lane, name, start, end))

    def work(self, lane: str) -> list[str]:
        return [name for _, name, _, _ in sorted((r for r in self.rows if r[0] == lane), key=lambda r: r[2])]

    def span(self, lane: str, name: str, turn: int = 0) -> tuple[float, float]:
        found = sorted((start, end) for where, what, start, end in self.rows if (where, what) == (lane, name))
        assert len(found) > turn, f"{lane} {name} is not in {self.rows}"
        return found[turn]


class Meeting:
    """Counts the calls of a method on its thread; lets computation wait until there were so many."""

    def __init__(self, owner: object, method: str):
        self.count, self.changed, inner = 0, threading.Condition(), getattr(owner, method)

        def counted(*args):
            with self.changed:
                self.count += 1
                self.changed.notify_all()
            return inner(*args)

        setattr(owner, method, counted)

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, timeout=20), f"{self.count} of {count} have begun"
