"""A replication of "Scalable Diffusion Models with Transformers" (DiT), one room a chapter."""
