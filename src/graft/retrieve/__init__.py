"""Retrievers: token trees from what the model has already said and judged, at no draft pass."""

from graft.retrieve.base import Judged, Retriever
from graft.retrieve.datastore import DatastoreLookup
from graft.retrieve.recall import Recall
from graft.retrieve.suffix import SuffixLookup

__all__ = ["DatastoreLookup", "Judged", "Recall", "Retriever", "SuffixLookup"]
