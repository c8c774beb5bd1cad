"""Baselines and ablations: the policies that Graft is compared with. Importing this package adds them to `POLICIES`.

`dense` and `prune` are an EAGLE-3 tree without and with gates. `paper` is the published way to graft on it. `block` and
`block-paper` do the same for a chain. An ablation, `graft-without-...`, is `graft` with one part left out.
`dense-with-noise` and `paper-with-noise` know the noise of coming draws, as `graft` always does.

All are settings of the rounds that `graft` runs (`FixedTree`), on the same kernels and graphs.
"""

from graft.bench.baselines.ablations import ABLATIONS
from graft.bench.baselines.block import Block, BlockPaper
from graft.bench.baselines.dense import Dense, DenseWithNoise, Prune
from graft.bench.baselines.paper import Paper, PaperWithNoise
from graft.spec_decode.policies import POLICIES, Policy

BASELINES: dict[str, type[Policy]] = {
    "dense": Dense,
    "prune": Prune,
    "paper": Paper,
    "dense-with-noise": DenseWithNoise,
    "paper-with-noise": PaperWithNoise,
    "block": Block,
    "block-paper": BlockPaper,
}
POLICIES.update(BASELINES | ABLATIONS)

__all__ = ["ABLATIONS", "BASELINES"]
