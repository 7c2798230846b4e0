"""Where bytes live and how they move: host memory, NVMe files, CUDA streams, and the arithmetic of a placement."""
