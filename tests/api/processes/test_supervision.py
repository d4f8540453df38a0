"""Restart budgets and hung processes, on a clock that a test sets."""

from collections.abc import Callable

from api.processes.supervision import (
    FIRST_DELAY_S,
    PAUSE_S,
    STEADY_S,
    ProcessState,
    Restarts,
    Supervised,
    SupervisionSettings,
)


class Clock:
    """Stands still until a test makes time pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Process:
    """What a start gives; it notes that it was killed."""

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


class Scene:
    """A supervised process, the clock, and what was noted."""

    def __init__(self, **settings: float) -> None:
        self.clock, self.notes, self.started = Clock(), list[str](), list[Process]()
        given = SupervisionSettings(
            process_restarts=int(settings.pop("restarts", 3)),
            restart_window_s=settings.pop("window_s", 600.0),
        )
        self.process = Supervised(
            "the controller",
            "controller",
            self._start,
            lambda where, what: self.notes.append(f"{where}: {what}"),
            given,
            clock=self.clock,
        )
        self.process.begin()
        self.process.reported()

    def _start(self) -> Callable[[], None]:
        self.started.append(Process())
        return self.started[-1].kill

    def passes(self, seconds: float, step_s: float = 5.0) -> None:
        """Time passes while somebody looks all the time."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + step_s)
            self.process.check()

    def dies(self) -> None:
        self.process.ended("the controller was killed by SIGKILL")


def test_restart_beyond_the_budget_of_a_window_waits_a_minute() -> None:
    clock = Clock()
    restarts = Restarts(2, SupervisionSettings(restart_window_s=100.0), clock)
    delays = []
    for pause_s in (0.0, 60.0, 39.0, 1.0):
        clock.now += pause_s
        delays.append(restarts.next_delay_s(ran_s=1.0))

    assert delays == [0.1, 0.2, PAUSE_S, PAUSE_S]
    clock.now += 100.0
    assert restarts.next_delay_s(ran_s=STEADY_S) == FIRST_DELAY_S


def test_process_that_exits_is_started_again_after_a_growing_delay() -> None:
    scene = Scene()
    scene.dies()
    assert scene.notes[-1] == (
        "the controller: the controller was killed by SIGKILL; restarting in 0.1 s"
    )
    scene.passes(0.05, 0.05)
    assert len(scene.started) == 1
    scene.passes(0.1, 0.05)
    assert len(scene.started) == 2
    scene.dies()

    assert scene.notes[-1].endswith("; restarting in 0.2 s")


def test_process_beyond_its_budget_is_degraded_and_started_again_after_a_minute() -> None:
    scene = Scene(restarts=2)
    for _ in range(3):
        scene.dies()
        scene.passes(10.0)

    assert scene.process.view().state is ProcessState.DEGRADED
    assert scene.notes[-1].endswith(
        "restarting in 60.0 s: 2 restarts within 600 s used up, serving continues without it"
    )
    assert (len(scene.started), scene.process.restarts) == (3, 2)

    scene.passes(50.0)
    scene.process.reported()
    assert scene.process.view().state is ProcessState.RUNNING


def test_hung_process_is_late_then_killed_then_started_again() -> None:
    scene = Scene()
    scene.passes(14.0, 1.0)
    assert not scene.process.view().is_late
    scene.passes(2.0, 1.0)

    assert scene.process.view().is_late
    assert scene.notes == ["the controller: no report for 15.0 s, SIGKILL after 30 s"]
    scene.passes(14.0, 1.0)
    assert scene.started[0].is_killed
    assert scene.notes[-1] == (
        "the controller: no report for 30.0 s, expected one within 30 s: killed"
    )

    scene.dies()
    scene.passes(1.0, 0.5)
    assert (len(scene.started), scene.process.restarts) == (2, 1)


def test_process_without_a_first_report_is_killed() -> None:
    scene = Scene()
    scene.process.retire()
    scene.process.begin()
    scene.passes(SupervisionSettings.start_deadline_s - 1.0, 1.0)
    assert not scene.started[-1].is_killed
    scene.passes(1.0, 1.0)

    assert scene.started[-1].is_killed


def test_process_whose_start_makes_progress_is_given_as_long_as_it_needs() -> None:
    scene = Scene()
    scene.process.retire()
    scene.process.begin()
    limit_s = SupervisionSettings.start_deadline_s
    for functions in range(10):
        scene.process.starting(f"compiling: {functions} functions")
        scene.passes(limit_s - 1.0)

    assert not scene.started[-1].is_killed
    view = scene.process.view()
    assert (view.state, view.work) == (ProcessState.STARTING, "compiling: 9 functions")
    scene.passes(1.0)
    assert scene.started[-1].is_killed
    assert scene.notes[-1] == (
        "the controller: no progress of its start (compiling: 9 functions) for 300.0 s, "
        "expected one within 300 s: killed"
    )


def test_report_ends_a_start() -> None:
    scene = Scene()
    scene.process.retire()
    scene.process.begin()
    scene.process.starting("compiling")
    scene.process.reported()
    scene.process.starting("late, and ignored")

    assert (scene.process.view().state, scene.process.view().work) == (ProcessState.RUNNING, "")


def test_suspended_supervisor_kills_no_process() -> None:
    scene = Scene()
    scene.process.check()
    scene.clock.now += 100
    scene.process.check()

    assert not scene.started[0].is_killed
    assert scene.notes == []
