"""Model folders: finding, reading and writing them, whatever format stores their tensors and wherever they lie."""
