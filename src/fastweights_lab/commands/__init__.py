"""What the one program does: a module for each of its commands."""
