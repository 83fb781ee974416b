"""The card and the curves of a trained model, and its upload, to the Hugging Face hub or to a bucket."""
