"""What tests share: cases, inputs, and what judges them."""
