"""How samples scatter at the power limit, by how long a config runs before and while it is timed.

    python benchmarks/pace.py [--seconds 4]

Four configs of one long prefill are sampled in turn, in random order every round. Of each is told
its mean over the rounds' means and the standard deviation of that ratio, both in percent.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from autoflash.bench import Pace
from autoflash.cards import open_card
from autoflash.config import Config
from autoflash.problem import Problem
from autoflash.runtime.hopper_validity import prefill_hopper_default

PROBLEM = Problem("prefill", "bf16", 1, 32, 8, 128, 8192, 8192, causal=True)
WIDE = {"HEAD_GROUP_MIB": 48}
CHANGES = (WIDE, WIDE | {"PING_PONG": 1}, {}, WIDE | {"SCHEDULE": "early"})  # of the default
PACES_MS = ((0, 10), (40, 10), (35, 35), (35, 50), (15, 50), (100, 100))
FEWEST_ROUNDS = 6


def scatter(samples: Mapping[Config, Sequence[float]]) -> dict[Config, tuple[float, float]]:
    """Of each config: how far from its round's mean it was, and by how much that varied, in %."""
    means = [fmean(row) for row in zip(*samples.values(), strict=True)]
    found = {}
    for config, taken in samples.items():
        over = [100 * (us / mean - 1) for us, mean in zip(taken, means, strict=True)]
        found[config] = fmean(over), stdev(over)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=4.0, help="of GPU time for each pace")
    seconds = parser.parse_args().seconds
    card, order = open_card(0), random.Random(0)
    default = dict(prefill_hopper_default(PROBLEM, card.hello()[0]))
    configs = [Config.of("prefill_hopper", default | other) for other in CHANGES]
    card.prepare(PROBLEM, 0)
    for lead_ms, timed_ms in PACES_MS:
        for config in configs:
            card.arm(config, Pace(1e3 * lead_ms, 1e3 * timed_ms))
        samples: dict[Config, list[float]] = {config: [] for config in configs}
        turn_s = len(configs) * (lead_ms + timed_ms) / 1e3
        for _ in range(max(FEWEST_ROUNDS, round(seconds / turn_s))):
            row = order.sample(configs, len(configs))
            ((taken, _),) = card.sample([row])
            for config, us in zip(row, taken, strict=True):
                samples[config].append(us)
        told = ", ".join(f"{mean:+.2f} sd {sd:.2f}" for mean, sd in scatter(samples).values())
        print(f"{lead_ms} ms untimed, {timed_ms} timed: {told}")


if __name__ == "__main__":
    main()
