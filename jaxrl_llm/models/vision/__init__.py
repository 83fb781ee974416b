"""The vision part of a network: encoders of images, and projectors from their patches to embeddings of the decoder."""
