"""What a chapter shows: source, figures, films."""
