"""Block-diffusion mathematics: model, decoders, traces and their exact replay.

Imports torch, triton, numpy and safetensors only, so that the engine plugin, the trainer and the tests
share one implementation without dragging each other's stacks in.
"""
