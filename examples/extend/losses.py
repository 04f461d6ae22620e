"""A loss with a setting: `--set loss.function=losses.py:softened --set loss.params.temperature=0.5`."""


def softened(batch, *, temperature=1.0):
    """Weigh advantages by a soft gate on the importance ratio, and report the gate."""
    ratio_R = (batch.logprobs_R - batch.rollout_logprobs_R).exp()
    gate_R = (-((ratio_R - 1) ** 2) / temperature).exp()
    return -gate_R.detach() * ratio_R * batch.advantages_R, {"gate": gate_R.detach()}
