"""Speed: of the operators, layers and deep memories, and how cost grows."""
