"""Progress says how much is done and how long the rest will take."""

import io

from penstock.evaluate.progress import Progress


def test_skipped_work_counts_as_done_but_not_for_the_pace() -> None:
    now, out = [0.0], io.StringIO()
    progress = Progress(100, stream=out, clock=lambda: now[0])
    progress.say("begin")
    progress.skip(40)
    now[0] = 30.0
    progress.step(10)
    progress.say("go on")
    now[0] = 3700.0
    progress.step(50)
    progress.say("end")
    assert out.getvalue().splitlines() == [
        "  0%  0:00 gone, ? left  begin",
        " 50%  0:30 gone, 2:30 left  go on",
        "100%  1:01:40 gone, 0:00 left  end",
    ]
