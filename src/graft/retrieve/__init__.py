"""Retrievers: token trees from what the model has already said and judged, at no draft pass."""

from graft.retrieve.adjacency import Adjacency
from graft.retrieve.base import Retriever
from graft.retrieve.datastore import DatastoreLookup
from graft.retrieve.suffix import SuffixLookup

__all__ = ["Adjacency", "DatastoreLookup", "Retriever", "SuffixLookup"]
