"""One HTML file in which a person replays rollouts token by token (``python -m rollout.viewer RUN_DIR``)."""
