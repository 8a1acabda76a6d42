"""The learner: turns trajectories and rewards into the batch-synchronous update, as early as its
inputs allow.
"""
