"""The vision part of a network: encoders of tiles, and projectors from their patches to embeddings of the decoder."""
