import time

from rlctl.telemetry.phases import Phase, StepTimer


def test_phases_are_disjoint_and_add_up():
    timer = StepTimer()
    with timer(Phase.TRAINING):
        time.sleep(0.02)
        with timer(Phase.CHECKPOINT):
            time.sleep(0.03)
    time.sleep(0.01)
    seconds = timer.seconds()
    assert abs(sum(value for name, value in seconds.items() if name != "total") - seconds["total"]) < 1e-9
    assert seconds["training"] >= 0.02
    assert seconds["checkpoint"] >= 0.03
    assert seconds["other"] >= 0.01
    assert seconds["generation"] == 0.0
    assert set(seconds) == {phase.value for phase in Phase} | {"total"}


def test_a_phase_that_raises_is_still_counted_and_closed():
    timer = StepTimer()
    try:
        with timer(Phase.REWARD):
            time.sleep(0.01)
            raise ValueError
    except ValueError:
        pass
    reward = timer.seconds()["reward"]
    time.sleep(0.01)
    assert reward >= 0.01
    assert timer.seconds()["reward"] == reward
