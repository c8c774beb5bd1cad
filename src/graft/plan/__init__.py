"""Planning: what Graft would bring a model on GPUs that are not here, predicted from measured costs and acceptance.

`gpus.py` and `models.py` have facts, `cost.py` the seconds of a round, `acceptance.py` the measured accepted lengths,
`planner.py` the choice among them, `check.py` predictions beside what was measured. Nothing here runs a model.
"""
