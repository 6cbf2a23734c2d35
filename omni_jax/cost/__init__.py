"""Predicted step times, measured on this machine or estimated for a named GPU.

The scheduler, the simulator and the planner use both through one protocol, CostModel.
"""
