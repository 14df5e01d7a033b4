"""Likelihoods of decoded sequences under a model: one file per estimator."""
