"""The algorithms as pure tensor maths: usable without the rest of hacrl.

Nothing here depends on models, files, devices or randomness, so HACPO can be used inside another trainer:

    omega = capability_ratios([0.31, 0.44])                           # C_k / C_j
    advantages = capability_advantages(rewards, prompt, source, 0, omega)
    terms = HACPO().terms(Sequences(...), update=0)
    loss = -(terms.objective_N * HACPO().mean_weights(source, learner=0)).sum()
"""

from hacrl.algorithms.advantage import Advantages, baseline_bias, capability_advantages, group_advantages
from hacrl.algorithms.algorithm import Algorithm, Explanation, Reading
from hacrl.algorithms.capability import CapabilityOptions, CapabilityTracker, capability_ratios
from hacrl.algorithms.ftis import FTIS
from hacrl.algorithms.grpo import GRPO
from hacrl.algorithms.gspo import GSPO, clipped_minimum
from hacrl.algorithms.hacpo import HACPO, exponential_ratio, stepwise_clip, stepwise_lower_bound
from hacrl.algorithms.hacpo_robust import RobustHACPO
from hacrl.algorithms.imitation import Imitation
from hacrl.algorithms.luffy import LUFFY
from hacrl.algorithms.naive import Naive
from hacrl.algorithms.opd import OPD, log_gap
from hacrl.algorithms.rft import RFT
from hacrl.algorithms.success_gated import SuccessGated
from hacrl.algorithms.swarm import Swarm
from hacrl.algorithms.terms import Sequences, Terms, k3_kl, sequence_log_ratio
from hacrl.algorithms.topr import TOPR

KINDS = (HACPO, RobustHACPO, GSPO, GRPO, Naive, Swarm, FTIS, SuccessGated, LUFFY, TOPR, RFT, OPD)
ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in KINDS}

__all__ = ["ALGORITHMS", "FTIS", "GRPO", "GSPO", "HACPO", "LUFFY", "OPD", "RFT", "TOPR", "Naive", "RobustHACPO"]
__all__ += ["Algorithm", "CapabilityOptions", "Explanation", "Imitation", "Sequences", "SuccessGated", "Swarm", "Terms"]
__all__ += ["Advantages", "CapabilityTracker", "Reading", "baseline_bias", "capability_advantages", "capability_ratios"]
__all__ += ["clipped_minimum", "exponential_ratio", "group_advantages", "k3_kl", "log_gap", "sequence_log_ratio"]
__all__ += ["stepwise_clip", "stepwise_lower_bound"]
