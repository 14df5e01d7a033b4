"""The engine side: stock SGLang with block-diffusion decoders and logs, started, attached to and looked into."""
