"""Trees of any shape, drawn by hypothesis."""

import torch
from hypothesis import strategies as st

from graft.tree.tree import PADDING, DraftTree


@st.composite
def trees(draw):
    """Trees of any shape, rows of different sizes."""
    width = draw(st.integers(1, 12))
    tokens, parents, sources = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, width))
        parents.append([0] + [draw(st.integers(0, node - 1)) for node in range(1, count)] + [0] * (width - count))
        tokens.append([draw(st.integers(0, 3)) for _ in range(width)])
        sources.append([0] + [1] * (count - 1) + [PADDING] * (width - count))
    return DraftTree(*map(torch.tensor, (tokens, parents)), torch.zeros(len(tokens), width), torch.tensor(sources))


def path_of(parents, node):
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path
