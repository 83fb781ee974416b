"""What goes with a trained model to other people: its card, its curves, and the way to the Hugging Face hub."""
