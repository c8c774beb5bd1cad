"""Baselines and ablations: the policies that Graft is compared with. Importing this package registers them by name.

`dense` and `prune` are an EAGLE-3 tree without and with gates. `paper` is the published way to graft on it. `block` and
`block-paper` do the same for a chain. An ablation, `graft-without-...`, is `graft` with one part left out.
`dense-with-noise` and `paper-with-noise` know the noise of coming draws, as `graft` always does.
"""

from graft.bench.baselines.ablations import ABLATIONS
from graft.bench.baselines.block import Block, BlockPaper
from graft.bench.baselines.dense import Dense, DenseWithNoise, Prune
from graft.bench.baselines.paper import Paper, PaperWithNoise
from graft.spec_decode.policies import Policy, register_policy

BASELINES: dict[str, type[Policy]] = {
    "dense": Dense,
    "prune": Prune,
    "paper": Paper,
    "dense-with-noise": DenseWithNoise,
    "paper-with-noise": PaperWithNoise,
    "block": Block,
    "block-paper": BlockPaper,
}
for _name, _policy in (BASELINES | ABLATIONS).items():
    register_policy(_name, _policy)

__all__ = ["ABLATIONS", "BASELINES"]
