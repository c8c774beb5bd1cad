"""Reference implementation of a round's kernels, slow and obvious, node by node.

Products are taken in the same order, in float32, so that results are the same to the last bit. Paths are compared as
what they are, tuples of tokens, and probabilities are put into buckets by whole numbers.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from graft.tree.device.buffers import AGREED, ALONE, NO_TOKEN, OPPOSED

NUM_BUCKETS = 16
MAX_MATCH, MAX_OCCURRENCES = 24, 12
MATCHES, SHARES = (2, 3, 4, 6, 9, 13, 18, MAX_MATCH), (0.0, 0.3, 0.6, 0.9)
SURE, LEAST = np.float32(0.999), np.float32(1e-30)
MASK = (1 << 64) - 1


def splitmix(number):
    """The published SplitMix64 of a state."""
    x = (number + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


NOISES = (0.05, 0.15, 0.35, 0.7, 1.3, 2.2, 3.5)  # where the buckets of E begin, after the first


def time_of(draws, depth, token):
    """E = exp(-g) of a token in a draw, by the definition of Gumbel noise."""
    if draws.times is not None:
        return float(draws.times[depth - 1][token]) if depth <= len(draws.times) else 0.7
    key = splitmix((splitmix(draws.seed & MASK) + draws.position + depth - 1) & MASK)
    bits = splitmix((key + token * 0x9E3779B97F4A7C15) & MASK) >> 11
    return -math.log((bits + 0.5) / (1 << 53))


def can_be_drawn(draws, depth, token):
    return draws is None or not (token in draws.banned or (depth <= draws.num_unending and token in draws.endings))


FACTORS = [splitmix(number) | 1 for number in range(4)]  # of a row's hash: for three tokens and the salt


def bucket_of(probability):
    """Two buckets a halving; p <= 2^(-b/2) exactly when p^2 <= 2^-b."""
    square = Fraction(float(probability)) ** 2
    return sum(square <= Fraction(1, 1 << bucket) for bucket in range(1, NUM_BUCKETS))


def path_of(above, chance):
    path = np.float32(above) * min(np.float32(chance), SURE)
    return np.float32(0) if path < LEAST else path


def highest(values, count):
    """The places of the highest values, best first, of equals the first."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


@dataclass
class Node:
    token: int
    parent: int  # its place in the row
    words: tuple  # the tokens from the root down to it, without the root's
    path: np.float32
    needs: int
    source: int
    score_bucket: int
    agreement: int = ALONE


class Candidates:
    """Rows of nodes, the root first."""

    def __init__(self, roots, histories, salts=(), draws=None):
        """draws: by row, a `RowDraws`, or None for a greedy one."""
        self.draws = draws or [None] * len(roots)
        self.rows = [[Node(int(root), 0, (), np.float32(1), 0, 0, 0)] for root in roots]
        self.texts = [[NO_TOKEN, NO_TOKEN, *history] for history in histories]  # the root last
        self.salts = list(salts) or [0] * len(self.rows)

    @property
    def width(self):
        return len(self.rows[0])

    def _add(self, row, token, parent, chance, source, score_bucket, needs=None):
        nodes = self.rows[row]
        above = nodes[parent]
        own_needs = above.needs if needs is None else needs
        is_drawable = can_be_drawn(self.draws[row], len(above.words) + 1, token)
        path = path_of(above.path, chance) if is_drawable else np.float32(0)
        nodes.append(Node(token, parent, (*above.words, token), path, own_needs, source, score_bucket))

    def _kind(self, row):
        return self.draws[row].kind if self.draws[row] is not None else 0

    def _chance(self, chances, row, agreement, source, score_bucket):
        return float(chances[3 * self._kind(row) + agreement, source, score_bucket])

    def _copied_bucket(self, row, parent, token, score_bucket):
        """In a sampled row the score bucket of a copied token is split by the bucket of its E."""
        if not self._kind(row):
            return score_bucket
        time = time_of(self.draws[row], len(self.rows[row][parent].words) + 1, token)
        return 8 * score_bucket + sum(time >= end for end in NOISES)

    def _successor_buckets(self, row, parent, entries):
        """In a sampled row: of the probability that each is drawn, by its own probability and its noise."""
        draws, depth, weights = self.draws[row], len(self.rows[row][parent].words) + 1, []
        if not self._kind(row):
            return entries
        for token, score_bucket in entries:
            below = score_bucket - entries[0][1]
            is_weighed = below >= 0 and can_be_drawn(draws, depth, token)
            weights.append(draws.share_power(below / 2) / time_of(draws, depth, token) if is_weighed else 0.0)
        if not sum(weights) > 0:
            return entries
        shares = [weight / sum(weights) for weight in weights]
        return [(token, bucket_of(share)) for (token, _), share in zip(entries, shares, strict=True)]

    def add(self, tokens, parents, probabilities, sources, score_bucket, needs=None):
        columns = (tokens, parents, probabilities, sources, score_bucket)
        for row in range(len(self.rows)):
            for node in zip(*(column[row].tolist() for column in columns), strict=True):
                self._add(row, *node, needs)

    def add_level(self, level, chances, source, needs, first, going, num_beams):
        reached = []
        for row in range(len(self.rows)):
            start = len(self.rows[row])
            columns = (level.tokens, level.parents, level.probabilities)
            for token, parent, q in zip(*(column[row].tolist() for column in columns), strict=True):
                score_bucket = 0 if chances is None else bucket_of(q)
                chance = q if chances is None else self._chance(chances, row, ALONE, source, score_bucket)
                chance = chance if going[row] and q > 0 else 0.0
                self._add(row, token, parent + first if parent else 0, chance, source, score_bucket, needs)
            total = np.float32(0)
            for node in self.rows[row][start : start + num_beams]:
                total += node.path
            reached.append(min(float(total), 1.0))
        return reached

    def _pad(self, source=0):
        width = max(map(len, self.rows))
        for row, nodes in enumerate(self.rows):
            while len(nodes) < width:
                self._add(row, 0, 0, 0.0, source, 0)

    def keep_best(self, counts):
        for nodes, count in zip(self.rows, counts, strict=True):
            stays = set(highest([node.path for node in nodes], count + 1))
            for place, node in enumerate(nodes):
                if place not in stays:
                    node.path = np.float32(0)

    def merge(self, drafted=-1, chances=None):
        for row, nodes in enumerate(self.rows):
            kept = {}
            for place, node in enumerate(nodes):
                if node.words not in kept or node.path > nodes[kept[node.words]].path:
                    kept[node.words] = place
            stand_in = [kept[node.words] for node in nodes]
            spoken = {stand_in[n.parent] for n in nodes if n.source == drafted and n.path > 0}
            old = [replace(node) for node in nodes]
            for place, node in enumerate(nodes):
                is_kept = stand_in[place] == place
                copies = [old[place], *(copy for copy in old if copy.words == node.words and copy.path > 0)]
                node.parent = stand_in[old[place].parent]
                node.needs = min(copy.needs for copy in copies) if is_kept else 0
                node.path = old[place].path if is_kept else np.float32(0)
                node.agreement = ALONE
                if chances is None:
                    continue
                if is_kept and len({copy.source for copy in copies}) > 1:  # several propose it
                    node.agreement = AGREED
                elif node.parent in spoken and node.source != drafted:
                    node.agreement = OPPOSED
            if chances is None:
                continue
            for place in sorted(range(1, len(nodes)), key=lambda place: len(nodes[place].words)):
                node = nodes[place]
                if node.path > 0:
                    chance = self._chance(chances, row, node.agreement, node.source, node.score_bucket)
                    node.path = path_of(nodes[node.parent].path, chance)

    def ranked(self, total, caps):
        """(row, place) of the likeliest nodes of all rows together, of each row at most its cap."""
        ranked = []
        for row, (nodes, cap) in enumerate(zip(self.rows, caps, strict=True)):
            had = [node.path for node in nodes]
            chosen = [place for place in highest(had[1:], cap) if had[place + 1] > 0]
            ranked += [(-had[place + 1], row, rank, place + 1) for rank, place in enumerate(chosen)]
        return [(row, place) for _, row, _, place in sorted(ranked)[:total]]

    def places(self, count, max_depth):
        """By row: places of the nodes to look up."""
        if not any(node.needs for nodes in self.rows for node in nodes):
            return [[0] for _ in self.rows]
        return [
            [
                place + 1
                for place in highest([node.path for node in nodes[1:]], count)
                if nodes[place + 1].path > 0 and len(nodes[place + 1].words) < max_depth
            ]
            for nodes in self.rows
        ]

    def judged(self, emitted):
        """Of each row the nodes that were put to the test by the tokens that came, and whether each fitted."""
        rows = []
        for nodes, came in zip(self.rows, emitted, strict=True):
            tested = {}
            for place, node in enumerate(nodes):
                above = nodes[node.parent].words
                is_tested = node.source > 0 and node.path > 0 and len(above) < len(came)
                if place and is_tested and list(above) == came[: len(above)]:
                    tested[place] = list(node.words) == came[: len(node.words)]
            rows.append(tested)
        return rows

    # Tables

    def _context(self, row, place):
        text = [*self.texts[row], *self.rows[row][place].words]
        return text[-1], text[-2], text[-3]

    def follow(self, tables, chances, first, waves, beam, max_depth):
        num_successors = tables.num_successors
        for row, nodes in enumerate(self.rows):
            done = set()
            for _ in range(min(waves, max_depth)):
                width = len(nodes)
                is_open = [p not in done and len(n.words) < max_depth for p, n in enumerate(nodes)]
                paths = [node.path if is_open[place] else 0.0 for place, node in enumerate(nodes)]
                for place in highest(paths, min(beam, width)):
                    number, entries = tables.longest_known(*self._context(row, place), self.salts[row])
                    entries = self._successor_buckets(row, place, entries) if entries and paths[place] > 0 else None
                    for rank in range(num_successors):
                        token, score_bucket, chance = 0, NUM_BUCKETS - 1, 0.0
                        if entries is not None and rank < len(entries):
                            token, score_bucket = entries[rank]
                            chance = self._chance(chances, row, ALONE, number + first, score_bucket)
                        self._add(row, token, place, chance, number + first, score_bucket)
                    done.add(place)

    # Copies

    def _add_successor(self, row, tables, parent, rank, chance, source):
        entries = None
        if self.rows[row][parent].path > 0:
            _, entries = tables.longest_known(*self._context(row, parent), self.salts[row])
        known = entries is not None and rank < len(entries)
        self._add(row, entries[rank][0] if known else 0, parent, chance if known else 0.0, source, 0)

    def fill(self, tables, templates, chance, source, max_depth):
        start = self.width
        for row, template in enumerate(templates):
            for parent, rank, depth in template:
                if depth <= max_depth:
                    self._add_successor(row, tables, start + parent - 1 if parent else 0, rank, chance, source)
        self._pad(source)

    def extend_leaf(self, tables, chance, source, max_depth):
        for row, nodes in enumerate(self.rows):
            with_children = {node.parent for node in nodes if node.path > 0}
            reached = [
                node.path if place not in with_children and len(node.words) < max_depth else 0.0
                for place, node in enumerate(nodes)
            ]
            (leaf,) = highest(reached, 1)
            is_leaf = reached[leaf] > 0
            self._add_successor(row, tables, leaf if is_leaf else 0, 0, chance if is_leaf else 0.0, source)

    def attach_copies(self, own, past, beside, first, chances, num_places, max_depth, length, num_nodes):
        """own: each row's text; past, beside: by row, texts, and those beside each with the tokens of its prompt."""
        for row, places in enumerate(self.places(num_places, max_depth)):
            for place in places:
                node = self.rows[row][place]
                suffix = [*own[row][-MAX_MATCH:], *node.words]
                depth = min(length, max_depth - len(node.words))
                start = len(self.rows[row])
                found = [occurrences(texts, suffix, depth) for texts in ([own[row]], past[row])]
                for text, num_prompt in beside[row]:
                    other = occurrences([text], suffix, depth, num_prompt)
                    if max((match for match, _ in other), default=0) > max((match for match, _ in found[1]), default=0):
                        found[1] = other
                for token, parent, source, score_bucket in copies(found, num_nodes):
                    at = start + parent - 1 if parent else place
                    score_bucket = self._copied_bucket(row, at, token, score_bucket)
                    chance = self._chance(chances, row, ALONE, first + source, score_bucket)
                    self._add(row, token, at, chance, first + source, score_bucket)
        self._pad()


class Tables:
    """Tables of (order, bits of a row's number or None for a row a token, isolated), the longest first."""

    def __init__(self, kinds, num_successors=8):
        self.kinds, self.num_successors = kinds, num_successors
        self.rows = [{} for _ in kinds]  # row -> (tag, entries)

    def _row(self, kind, token, before, earlier, salt):
        order, bits, _ = kind
        if bits is None:
            return token, 0
        ngram = zip((token, before, earlier)[:order], FACTORS, strict=False)
        tag = (sum(number * factor for number, factor in ngram) + salt * FACTORS[3]) & MASK
        return (tag >> (64 - bits) if bits else 0), tag

    def learn(self, ngrams):
        """((token, before, earlier, salt), tokens, logits) each."""
        for ngram, tokens, logits in ngrams:
            shares = [math.exp(logit - logits[0]) for logit in logits]
            entries = [(t, bucket_of(share / sum(shares))) for t, share in zip(tokens, shares, strict=True)]
            for kind, rows in zip(self.kinds, self.rows, strict=True):
                row, tag = self._row(kind, *ngram)
                old = rows[row][1][len(entries) :] if row in rows else []
                rows[row] = (tag, entries + old)

    def longest_known(self, token, before, earlier, salt):
        for number, (kind, rows) in enumerate(zip(self.kinds, self.rows, strict=True)):
            for whose in (salt, 0) if kind[2] else (salt,):
                row, tag = self._row(kind, token, before, earlier, whose)
                if row in rows and rows[row][0] == tag:
                    return number, rows[row][1]
        return len(self.kinds) - 1, None


def occurrences(texts, suffix, length, num_prompt=0):
    """Where the suffix's last two tokens occur with something behind them, no earlier than the texts' first
    `num_prompt` tokens: how far back it matches, and up to `length` tokens behind. Of all occurrences only the last few
    are looked at, those at a text's end among them."""
    if len(suffix) < 2:
        return []
    ends = [(t, e) for t, text in enumerate(texts) for e in range(2, len(text) + 1) if text[e - 2 : e] == suffix[-2:]]
    found = []
    for number, end in ends[-MAX_OCCURRENCES:]:
        text, match = texts[number], 0
        while match < min(end, len(suffix), MAX_MATCH) and text[end - match - 1] == suffix[-match - 1]:
            match += 1
        if num_prompt <= end < len(text):
            found.append((match, text[end : end + length]))
    return found


def copies(sources, num_nodes):
    """A tree of what followed the longest matches in each of some lists of occurrences, breadth first.

    Nodes are (token, parent, source, score bucket); parents count from 1, and 0 is the place that the tree hangs at.
    """
    tree, numbers = [], {}
    for source, found in enumerate(sources):
        longest = max((match for match, _ in found), default=0)
        branches = deque([(0, 0, [chain for match, chain in found if 2 * match > longest])])
        left = num_nodes
        while branches and left > 0:
            parent, depth, branch = branches.popleft()
            following = {}
            for chain in branch:
                if len(chain) > depth:
                    following.setdefault(chain[depth], []).append(chain)
            for token, chains in sorted(following.items(), key=lambda item: -len(item[1]))[:left]:
                match = sum(least <= longest + depth for least in MATCHES) - 1
                share = sum(least <= len(chains) / len(branch) for least in SHARES) - 1
                if (parent, token) not in numbers:
                    tree.append((token, parent, source, match * len(SHARES) + share))
                    numbers[parent, token] = len(tree)
                branches.append((numbers[parent, token], depth + 1, chains))
                left -= 1
    return tree


def walk(tokens, parents, sources, chosen):
    """Nodes and tokens that are accepted when `chosen` [n] is what is chosen after each node."""
    nodes, came, node = [], [chosen[0]], 0
    while True:
        children = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == came[-1] and sources[n] > 0]
        if not children:
            return nodes, came
        node = children[0]
        nodes.append(node)
        came.append(chosen[node])
