"""Proposers: retrievers find candidate tokens without a model, drafters run a draft model."""

from graft.spec_decode.proposers.base import Retriever, TargetTopK
from graft.spec_decode.proposers.ngram_tables import NgramTables
from graft.spec_decode.proposers.suffix import SuffixLookup

__all__ = ["NgramTables", "Retriever", "SuffixLookup", "TargetTopK"]
