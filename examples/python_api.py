"""Train the laptop model with a reward, an algorithm and a loop of your own, then sample from it: a CPU will do."""

import re

import rlctl


def brief(completion: str, answer: str, prompt: str, **row: object) -> float:
    """1 for the right number alone, and less for every further word."""
    numbers = re.findall(r"-?\d+", completion)
    return float(numbers[-1:] == [str(answer)]) - 0.02 * len(completion.split())


class Reinforce(rlctl.Algorithm):
    """REINFORCE; the baseline is the mean reward of the prompt's rollouts."""

    def advantages(self, rewards_G):
        return rewards_G - rewards_G.mean()

    def token_loss(self, batch):
        return -(batch.logprobs_R - batch.rollout_logprobs_R).exp() * batch.advantages_R


class Announcing(rlctl.Loop):
    """Says what each step is about to train on."""

    def sample(self):
        sampled = super().sample()
        self.parts.journal.say(f"best of step {self.step + 1}: {max(r.reward for r in sampled.rollouts):.2f}")
        return sampled


def main() -> None:
    values = {"run.algorithm": Reinforce, "reward.terms": [{"name": brief}]}
    summary = rlctl.train(rlctl.load_config("laptop", values=values), loop=Announcing)
    print([round(line["reward_mean"], 3) for line in rlctl.read_metrics(summary.directory)])
    for record in rlctl.generate(rlctl.load_config(), ["3 + 4 ="], run_dir=summary.directory):
        print(record["completions"][0]["text"])


if __name__ == "__main__":  # the processes of the run read this file too
    main()
