"""What layers are made of: gates, norms, convolutions, states, a token."""

# A layer of your own needs layer (its class) and state (what it keeps), and of
# gates, convolution and output_norm what it has. If it cannot read packs:
# unpacked_rows. Attention has causal_attention, window_attention and rotary.
# layer_arguments refuses. For a few tokens in few launches: fused_step, on a
# CPU fused_step_in_torch; plain_modules says whose weights they may use.
