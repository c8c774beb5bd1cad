"""Prediction of Graft's speed on GPUs that are not here, from measured efficiencies and accepted lengths.

`gpus.py` and `models.py` hold data-sheet facts, `cost.py` computes the time of a round, `acceptance.py` holds measured
accepted lengths, `planner.py` chooses the best budget. `tests/test_plan.py` compares predictions with measurements.
"""
