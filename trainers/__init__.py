"""The trainer side: verl's actor engine for block diffusion, rewards, metrics and the warm start."""
