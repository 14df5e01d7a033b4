"""Refresh the weights of running engines from trainer ranks, in place. Knows no trainer framework."""
