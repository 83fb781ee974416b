"""Programs written for one kind of hardware: kernels of attention and matmuls, each with a plain path as reference."""
