"""One file an op: its contract, fake kernels, autograd.Function and public function."""
