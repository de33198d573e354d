"""What layers are made of: gates, norms, convolutions, states, a token."""
