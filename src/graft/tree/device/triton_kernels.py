"""The kernels of a round in Triton, see `kernels`."""

from graft.tree.device.best_first import grow as grow
from graft.tree.device.copies import add_copies as add_copies
from graft.tree.device.copies import begin as begin
from graft.tree.device.copies import choose_places as choose_places
from graft.tree.device.copies import lookup_bytes as lookup_bytes
from graft.tree.device.drafts import add_level as add_level
from graft.tree.device.outcome import advance as advance
from graft.tree.device.outcome import count as count
from graft.tree.device.outcome import learn as learn
from graft.tree.device.outcome import line_up as line_up
from graft.tree.device.ranking import lay_out as lay_out
from graft.tree.device.ranking import merge as merge
from graft.tree.device.ranking import rank as rank
from graft.tree.device.ranking import select as select
from graft.tree.device.stops import attach as attach
from graft.tree.device.stops import stop_rows as stop_rows
from graft.tree.device.tables import follow as follow
from graft.tree.device.walk import walk as walk
