"""What a network sees of images: encoders of tiles, and projectors from their patches to embeddings of the decoder."""
