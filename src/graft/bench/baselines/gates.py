"""The published gates: drafting stops at certain depths if the q of the likeliest path is at most a threshold."""

GATES = (1, 2, 6)  # the depths after which drafting may stop
PUBLISHED = (0.135, 0.14, 0.485)  # thresholds in the middle of the published ranges
THRESHOLDS = "gates/thresholds"  # key of the thresholds for trees in a policy's state
CHAIN_THRESHOLDS = "gates/chain"  # key of the thresholds for chains, of which fewer tokens are accepted
ALL_DEPTHS = 1 << 20  # of a row that no gate stopped
