"""``python -m rollout.chat``: a terminal chat that shows every block being unmasked in place."""
