"""end_with_parent(): a process that works for another one does not outlive it."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Called in a process that `multiprocessing` started: end when the parent has, however it did.

    A parent that is killed ends no children, daemons neither; they would go on with work that
    is not taken, and then wait for more of it.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
