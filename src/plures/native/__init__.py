"""C kernels that multiply only the weights that members own, and the little that compiles and loads them."""
