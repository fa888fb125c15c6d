"""--exact-resume restarts the envs at each checkpoint: where that cuts most episodes, the user is told, once."""

import pytest
from conftest import PROBED, small_args

WARNING = "warning: --exact-resume cuts"


def test_cut_episodes_are_told_once(script, capfd):
    """Catches: curves of the short episodes alone, without a word; and the same word at each of 1000 checkpoints."""
    changes = dict(num_steps=4, total_timesteps=8 * 5) | (dict(seq_len=4) if "lstm" in script.__name__ else {})
    script.train(small_args(script, exact_resume=True, checkpoint_every=1, **changes))
    out, err = capfd.readouterr()
    (line,) = [line for line in (out + err).splitlines() if WARNING in line]
    assert "--checkpoint-every" in line
    script.train(small_args(script, checkpoint_every=1, **changes))  # the envs are not restarted
    assert WARNING not in "".join(capfd.readouterr())
    script.train(small_args(script, exact_resume=True, checkpoint_every=5, **changes))  # nor here, but at the start
    assert WARNING not in "".join(capfd.readouterr())


@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_no_warning_where_episodes_fit(probed_script, capfd, checkpoint_every):
    """Catches: a warning that everyone learns to overlook."""
    actions, _ = PROBED[probed_script.__name__]
    env_id = f"probe_envs:ThreeSteps{actions}-v0"
    probed_script.train(small_args(probed_script, env_id=env_id, exact_resume=True, checkpoint_every=checkpoint_every))
    assert "warning" not in "".join(capfd.readouterr())


def test_episodes_are_counted_from_checkpoint_to_checkpoint(probed_script, capfd):
    """Catches: no warning where episodes grow longer with time, for enough of them ended long ago."""
    actions, _ = PROBED[probed_script.__name__]
    env_id = f"probe_envs:EverLonger{actions}-v0"
    probed_script.train(small_args(probed_script, env_id=env_id, exact_resume=True, checkpoint_every=1))
    assert WARNING in "".join(capfd.readouterr())
